"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from protocol.errors import InvalidRequest
from router.api.request_fields import (
    GenerationFields,
    LogprobsCount,
    StrictModel,
    Unsupported,
    only,
)
from router.chat_template import RESERVED_NAMES


class TextPart(StrictModel):
    """A piece of a message's content; text is the only kind supported."""

    type: Literal["text"]
    text: str


def _content_shape(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


class ChatMessage(StrictModel):
    """One message; the template also sees `name`, `tool_call_id` and `reasoning_content`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[TextPart], Field(min_length=1), Tag("<parts>")],
        Discriminator(_content_shape),
    ]
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    annotations: Annotated[Any, only([])] = None
    function_call: Unsupported = None
    tool_calls: Annotated[Any, only([])] = None

    def for_template(self, knows_developer_role: bool) -> dict[str, str]:
        """What a chat template reads: text parts become lines of one text."""
        text = self.content
        if not isinstance(text, str):
            text = "\n".join(part.text for part in text)
        is_foreign = self.role == "developer" and not knows_developer_role
        message = {"role": "system" if is_foreign else self.role, "content": text}
        for key in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, key)
            if value is not None:
                message[key] = value
        return message


class ChatRequest(GenerationFields):
    """A conversation; the answer is the assistant's next message, `n` times."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobsCount | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    modalities: Annotated[Any, only(["text"])] = None
    tool_choice: Annotated[Any, only("none")] = None
    tools: Annotated[Any, only([])] = None
    parallel_tool_calls: Unsupported = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none")] = None
    store: Annotated[Any, only(False)] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    metadata: Annotated[Any, only({})] = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
    prompt_cache_key: Unsupported = None
    safety_identifier: Unsupported = None
    continue_final_message: Annotated[Any, only(False)] = None
    chat_template: Unsupported = None
    documents: Unsupported = None

    @property
    def output_limit(self) -> int | None:
        """The limit on generated tokens, under either of its two names."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def logprobs_count(self) -> int | None:
        """How many alternatives to report for every token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_together(self) -> None:
        """See the base."""
        super().check_together()
        if self.max_tokens == 0:
            raise InvalidRequest("'max_tokens' must be at least 1", "max_tokens")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidRequest(
                "'max_tokens' and 'max_completion_tokens' differ; give one of them", "max_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
        reserved = sorted(RESERVED_NAMES & (self.chat_template_kwargs or {}).keys())
        if reserved:
            raise InvalidRequest(
                f"'chat_template_kwargs' may not set '{reserved[0]}'", "chat_template_kwargs"
            )
