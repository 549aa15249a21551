"""The JSON that the endpoints answer with, field for field as OpenAI's clients read it.

Fields that may be absent default to UNSET; null is said with None.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class CachedTokens(Struct, frozen=True):
    """Detail of the prompt's tokens."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of a whole HTTP request; every prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(Struct, frozen=True):
    """Parallel lists, one entry a token; `text_offset` counts characters of the text.

    Null stands for what an echoed prompt's first token has not: it follows nothing.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(Struct, frozen=True):
    """A token that might stand at some place of the prompt; the most likely has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptTokenLogprobs = list[dict[str, PromptTokenLogprob] | None]
"""By place, null at first, then by token id: the prompt's own token, and the most likely ones."""


class CompletionChoice(Struct, frozen=True):
    """One text, or a piece of it in a stream, of which the last one says why it ended.

    `stop_reason` is the stop string or token that ended it, null where none of those did.
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
    """Answer of `/v1/completions`, and every chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class TopLogprob(Struct, frozen=True):
    """A token that might have been chosen. `bytes` are its part of the UTF-8 text."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct, frozen=True):
    """A chosen token and the most likely ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Log-probabilities of a message, or of a piece of it."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(Struct, frozen=True):
    """What a tool call calls; `arguments` is JSON text, in a stream a piece of it."""

    arguments: str
    name: str | UnsetType = UNSET


class ChatToolCall(Struct, frozen=True):
    """A tool call of a message. Only in a stream it has an `index`, and `id` only at first."""

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessageBody(Struct, frozen=True):
    """The assistant's message; null for content says that there are tool calls alone.

    Reasoning has two names, its older one and the one that vLLM has now.
    """

    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatDelta(Struct, frozen=True):
    """What a chunk adds to the message; the first one names the role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One message of an answer. `stop_reason` is the stop string or token that ended it."""

    index: int
    message: ChatMessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """A piece of one message; the last one says why it ended."""

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
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class Model(Struct, frozen=True):
    """An entry of the list of models. `max_model_len` is the context in tokens."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "baton"


class ModelList(Struct, frozen=True):
    """Answer of `/v1/models`."""

    data: list[Model]
    object: Literal["list"] = "list"
