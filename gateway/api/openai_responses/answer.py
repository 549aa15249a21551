"""The JSON of OpenAI's Responses API, field for field as clients expect it."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from gateway.api.openai.answers import ChatTokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, frozen=True, tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    """Text of the model's reasoning."""

    text: str


class OutputMessage(Struct, frozen=True, tag="message"):
    """A message of the assistant."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(Struct, frozen=True, tag="reasoning"):
    """The model's reasoning, unabridged; there is no summary."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[Any] = field(default_factory=list)


class OutputCall(Struct, frozen=True, tag="function_call"):
    """A function call; `arguments` is JSON text."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall
Part = OutputText | ReasoningText


class InputDetails(Struct, frozen=True):
    """How much of the prompt was read from a cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """How much of the output was reasoning, its markers included."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(Struct, frozen=True):
    """Why a response failed."""

    code: Literal["server_error"]
    message: str


class Response(Struct, frozen=True, kw_only=True):
    """Answer of `/v1/responses`; it repeats fields of the request."""

    id: str
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    reasoning: dict[str, Any]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    user: str | None
    object: Literal["response"] = "response"
    background: bool = False
    previous_response_id: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
    prompt_cache_key: str | None
    safety_identifier: str | None
    top_logprobs: int
    truncation: Literal["auto", "disabled"]


class DeletedResponse(Struct, frozen=True):
    """Answer of `DELETE /v1/responses/{response_id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItems(Struct, frozen=True):
    """A page of `/v1/responses/{response_id}/input_items`."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class InputTokens(Struct, frozen=True):
    """Answer of `/v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class _ResponseEvent(Struct, frozen=True):
    """An event with the current state of the response."""

    sequence_number: int
    response: Response


class _WholeItemEvent(Struct, frozen=True):
    """An event with the current state of an item."""

    sequence_number: int
    output_index: int
    item: OutputItem


class _ItemEvent(Struct, frozen=True):
    """An event inside an item."""

    sequence_number: int
    output_index: int
    item_id: str


class Created(_ResponseEvent, frozen=True, tag="response.created"):
    """The first event."""


class Queued(_ResponseEvent, frozen=True, tag="response.queued"):
    """The response runs in the background and has not started yet."""


class InProgress(_ResponseEvent, frozen=True, tag="response.in_progress"):
    """Generation has started."""


class ItemAdded(_WholeItemEvent, frozen=True, tag="response.output_item.added"):
    """An item begins, empty."""


class PartAdded(_ItemEvent, frozen=True, tag="response.content_part.added"):
    """A part of an item begins, empty."""

    part: Part
    content_index: int = 0


class TopTextLogprob(Struct, frozen=True):
    """A candidate token."""

    token: str
    logprob: float


class TextLogprob(Struct, frozen=True):
    """A chosen token and the most likely tokens at its position, as events show them."""

    token: str
    logprob: float
    top_logprobs: list[TopTextLogprob]


class TextDelta(_ItemEvent, frozen=True, tag="response.output_text.delta"):
    """More text."""

    delta: str
    logprobs: list[TextLogprob]
    content_index: int = 0


class TextDone(_ItemEvent, frozen=True, tag="response.output_text.done"):
    """The whole text."""

    text: str
    logprobs: list[TextLogprob]
    content_index: int = 0


class ReasoningDelta(_ItemEvent, frozen=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str
    content_index: int = 0


class ReasoningDone(_ItemEvent, frozen=True, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    text: str
    content_index: int = 0


class ArgumentsDelta(_ItemEvent, frozen=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(_ItemEvent, frozen=True, tag="response.function_call_arguments.done"):
    """The complete arguments."""

    name: str
    arguments: str


class PartDone(_ItemEvent, frozen=True, tag="response.content_part.done"):
    """The whole part."""

    part: Part
    content_index: int = 0


class ItemDone(_WholeItemEvent, frozen=True, tag="response.output_item.done"):
    """The whole item."""


class Completed(_ResponseEvent, frozen=True, tag="response.completed"):
    """The last event of a complete response."""


class Incomplete(_ResponseEvent, frozen=True, tag="response.incomplete"):
    """The last event of a response that reached its token limit."""


class Failed(_ResponseEvent, frozen=True, tag="response.failed"):
    """The last event of a response that could not be finished."""


ResponseEvent = (
    Created | Queued | InProgress | ItemAdded | PartAdded | TextDelta | TextDone | ReasoningDelta
    | ReasoningDone | ArgumentsDelta | ArgumentsDone | PartDone | ItemDone | Completed | Incomplete
    | Failed
)  # fmt: skip
