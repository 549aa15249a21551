"""The body of `POST /v1/responses`.

The items of its input are in `gateway.api.openai_responses.input_items`. Whether `store`,
`background`, `previous_response_id` and references to items can be honoured depends on whether the
router keeps responses, so the endpoints decide about them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.body_reader import RequestBody, Unsupported
from gateway.api.constraints.constraint import Constraint
from gateway.api.constraints.constraint_fields import ResponseFormat
from gateway.api.function_tools import MAX_TOOLS, Hint, OtherTool, ToolName, tool_choice_shape
from gateway.api.generation_fields import (
    CacheLifetime,
    CacheSalt,
    GenerationFields,
    LogprobsCount,
    SamplingFields,
    StreamOptions,
    generation_of,
    openai_lifetime_s,
)
from gateway.api.openai.chat_request import Effort
from gateway.api.openai_responses.input_items import InputItem
from gateway.api.strict_model import StrictModel, bounded, first_error
from gateway.api.union_branches import LEFT_OUT, LIST, TEXT, TEXT_OR_LIST, by_type
from gateway.api.unknown_fields.ignorable_fields import ignorable, ignorable_entries
from protocol.errors import InvalidRequest

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
_Label = Annotated[str, Field(max_length=512)]


class ResponseFunction(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


ResponseTool = Annotated[
    Annotated[ResponseFunction, Tag("<function>")] | Annotated[OtherTool, LEFT_OUT],
    by_type("function", usual="function", others=LEFT_OUT),
]


class ChosenTool(StrictModel):
    """The one function that must be called."""

    type: Literal["function"]
    name: ToolName


class AllowedChoice(StrictModel):
    """Some of the tools, of which one may or must be called; the model sees no others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS), first_error]


class ReasoningConfig(StrictModel):
    """How much to think. There are no summaries: the answer contains the reasoning itself."""

    effort: Effort | None = None
    summary: Annotated[Any, ignorable("auto")] = None
    generate_summary: Annotated[Any, ignorable()] = None


class TextConfig(StrictModel):
    """The format of the text."""

    format: ResponseFormat | None = None
    verbosity: Annotated[Any, ignorable("medium")] = None


class InputTokensRequest(RequestBody):
    """A conversation as items, whose prompt's tokens are to be counted."""

    model: str | None = None
    input: Annotated[Annotated[str, TEXT] | Annotated[list[InputItem], bounded, LIST], TEXT_OR_LIST]
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS), first_error] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
            | Annotated[ChosenTool, Tag("<named>")]
            | Annotated[AllowedChoice, Tag("<allowed>")],
            Discriminator(tool_choice_shape),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    conversation: Unsupported = None
    cache_salt: CacheSalt | None = None

    def check_together(self) -> None:
        """See the base class."""
        super().check_together()
        if self.input == [] and self.previous_response_id is None:
            raise InvalidRequest("'input' is empty, and so needs 'previous_response_id'", "input")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise InvalidRequest("'tool_choice' needs 'tools'", "tool_choice")


class ResponsesRequest(SamplingFields, InputTokensRequest):
    """A conversation as items; the answer is the assistant's next turn."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Annotated[dict[str, _Label], Field(max_length=MAX_METADATA), first_error] | None = (
        None
    )
    user: _Label | None = None
    safety_identifier: _Label | None = None
    prompt_cache_key: _Label | None = None
    prompt_cache_retention: CacheLifetime = None
    store: bool | None = None
    background: bool | None = None
    include: Annotated[Annotated[list[str], bounded] | None, ignorable_entries(LOGPROBS)] = None
    service_tier: Hint = None
    prompt: Unsupported = None
    max_tool_calls: Hint = None
    top_logprobs: LogprobsCount | None = None

    def check_together(self) -> None:
        """See the base class."""
        super().check_together()
        if self.stream_options is not None and (
            not self.stream or self.stream_options.include_usage is not None
        ):
            raise InvalidRequest(
                "'stream_options' has 'include_obfuscation' alone, in streams", "stream_options"
            )
        if self.background and self.store is False:
            raise InvalidRequest("'background' needs 'store' to be true", "background")
        if self.top_logprobs and self.logprobs_count is None:
            raise InvalidRequest(
                f"'top_logprobs' needs 'include' to have '{LOGPROBS}'", "top_logprobs"
            )

    @property
    def lifetime_s(self) -> int | None:
        """See the base class."""
        return openai_lifetime_s(self.prompt_cache_retention)

    @property
    def session_name(self) -> str | None:
        """See the base class."""
        return self.session_id or self.prompt_cache_key

    @property
    def logprobs_count(self) -> int | None:
        """Number of alternatives to report per token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """See the base class."""
        wanted = self.text.format if self.text else None
        if wanted is None:
            return super().constraints
        return (*wanted.constraints("text.format"), *super().constraints)

    @property
    def generation(self) -> GenerationFields:
        """How to sample and when to stop, in the form that all endpoints share."""
        return generation_of(self, self.model, self.stream)
