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
from router.api.tool_fields import (
    MAX_TOOLS,
    MessageToolCall,
    NamedToolChoice,
    ToolFields,
    tool_choice_shape,
)
from router.chat.conversation import Conversation, Message, ToolChoice, ToolMode

NO_TEMPLATES = (
    "a template is a program, which no sandbox keeps from running for as long as it likes in a "
    "router that others use, too; 'chat_template_kwargs' reaches the checkpoint's own, and "
    "/v1/completions takes a prompt that was rendered elsewhere"
)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(StrictModel):
    """A piece of a message's content; text is the only kind supported."""

    type: Literal["text"]
    text: str


def _content_shape(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


_Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(min_length=1), Tag("<parts>")],
    Discriminator(_content_shape),
]


class ChatMessage(StrictModel):
    """One message; the template also sees `name`, `tool_call_id` and `reasoning_content`.

    `reasoning` is vLLM's name for `reasoning_content`. `parsed` is ignored: OpenAI's client adds
    its parsed form of an answer's content, and sends it back with the answer.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    parsed: Any = None
    refusal: Unsupported = None
    audio: Unsupported = None
    annotations: Annotated[Any, only([])] = None
    function_call: Unsupported = None

    def as_message(self, place: int) -> Message:
        """As a `Message`; text parts become lines of one text. Raises InvalidRequest."""
        param = f"messages[{place}]"
        calls = tuple(call.as_call() for call in self.tool_calls or ())
        if calls and self.role != "assistant":
            raise InvalidRequest(f"'{param}.tool_calls' is of the assistant alone", param)
        if self.content is None and not calls:
            raise InvalidRequest(f"'{param}.content' is required", f"{param}.content")
        text = self.content or ""
        if not isinstance(text, str):
            text = "\n".join(part.text for part in text)
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        return Message(self.role, text, self.name, thoughts, calls, self.tool_call_id)


class ChatRequest(GenerationFields):
    """A conversation; the answer is the assistant's next message, `n` times."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobsCount | None = None
    tools: Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
            | Annotated[NamedToolChoice, Tag("<named>")],
            Discriminator(tool_choice_shape),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    modalities: Annotated[Any, only(["text"])] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none")] = None
    store: Annotated[Any, only(False)] = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    audio: Unsupported = None
    prediction: Unsupported = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Unsupported = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_retention: Annotated[Any, only("in_memory")] = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    chat_template: Annotated[Any, only(why=NO_TEMPLATES)] = None

    @property
    def output_limit(self) -> int | None:
        """The limit on generated tokens, under either of its two names."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def logprobs_count(self) -> int | None:
        """Number of alternatives to report per token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def conversation(self) -> Conversation:
        """The request as a `Conversation`. Raises InvalidRequest."""
        return Conversation(
            messages=tuple(each.as_message(place) for place, each in enumerate(self.messages)),
            tools=tuple(tool.as_tool() for tool in self.tools or ()),
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            reasoning_effort=self.reasoning_effort,
            template_variables=self.chat_template_kwargs or {},
            documents=tuple(self.documents or ()),
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
        )

    def _tool_choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, NamedToolChoice):
            return ToolChoice(ToolMode.NAMED, self.tool_choice.function.name)
        return ToolChoice(ToolMode(self.tool_choice or "auto"))

    def check_together(self) -> None:
        """See the base class."""
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
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "'continue_final_message' and 'add_generation_prompt' exclude each other",
                "continue_final_message",
            )
        if self.parallel_tool_calls is not None and not self.tools:
            raise InvalidRequest("'parallel_tool_calls' needs 'tools'", "parallel_tool_calls")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise InvalidRequest("'tool_choice' needs 'tools'", "tool_choice")
