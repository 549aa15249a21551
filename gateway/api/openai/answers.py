"""The JSON of the endpoints' answers, field for field as OpenAI's clients expect it.

Fields that may be absent default to UNSET; None is encoded as null.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.api.replies.usage import Usage


class CompletionLogprobs(Struct, frozen=True):
    """Parallel lists with one entry per token; `text_offset` is in characters of the text.

    The first token of an echoed prompt has null entries, because no token comes before it.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(Struct, frozen=True):
    """A candidate token at one position of the prompt; the most likely one has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptTokenLogprobs = list[dict[str, PromptTokenLogprob] | None]
"""Per position (null for the first), by token id: the prompt's token and the most likely ones."""


class CompletionChoice(Struct, frozen=True):
    """One text, or in a stream a piece of it. The last piece says why the text ended.

    `stop_reason` is the stop string or token that ended the text, or null if none did.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptTokenLogprobs | UnsetType = UNSET


class Completion(Struct, frozen=True):
    """Answer of `/v1/completions`, and each chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None
    object: Literal["text_completion"] = "text_completion"


class TopLogprob(Struct, frozen=True, gc=False):
    """A candidate token. `bytes` are its part of the UTF-8 text."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatTokenLogprob(Struct, frozen=True, gc=False):
    """A chosen token and the most likely tokens at its position."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(Struct, frozen=True):
    """Log-probabilities of a message, or of a piece of it."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(Struct, frozen=True):
    """The function of a tool call; `arguments` is JSON text, in a stream a piece of it."""

    arguments: str
    name: str | UnsetType = UNSET


class ChatToolCall(Struct, frozen=True):
    """A tool call of a message. In a stream it has an `index`, and `id` in its first chunk only."""

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessageBody(Struct, frozen=True):
    """The assistant's message. Null content means that there are only tool calls.

    Reasoning appears under two names: the older `reasoning_content` and vLLM's `reasoning`.
    """

    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatDelta(Struct, frozen=True):
    """What a chunk adds to the message; the first chunk names the role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One message of an answer. `stop_reason` is the stop string or token that ended it."""

    index: int
    message: ChatMessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """A piece of one message; the last piece says why the message ended."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True):
    """Answer of `/v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptTokenLogprobs | UnsetType = UNSET
    service_tier: Literal["default"] | UnsetType = UNSET
    system_fingerprint: None = None
    object: Literal["chat.completion"] = "chat.completion"


class ChatChunk(Struct, frozen=True):
    """An event of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptTokenLogprobs | UnsetType = UNSET
    service_tier: Literal["default"] | UnsetType = UNSET
    system_fingerprint: None = None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class Model(Struct, frozen=True):
    """An entry of the list of models, with the fields that OpenAI's, vLLM's and Anthropic's clients
    read. `max_model_len` and `max_input_tokens` are the context length in tokens."""

    id: str
    created: int
    max_model_len: int
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    object: Literal["model"] = "model"
    owned_by: str = "baton"
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"


class ModelList(Struct, frozen=True):
    """Answer of `/v1/models`, always whole."""

    data: list[Model]
    first_id: str
    last_id: str
    object: Literal["list"] = "list"
    has_more: bool = False
