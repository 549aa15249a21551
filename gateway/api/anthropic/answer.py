"""The JSON of Anthropic's Messages API, field for field as clients expect it."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from gateway.http.anthropic_errors import AnthropicError


class TextBlock(Struct, frozen=True, tag="text"):
    """Text of the answer."""

    text: str


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    """The model's reasoning before its answer; not signed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    """A tool call. In a stream `input` starts empty, and its JSON text follows in deltas."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Struct, frozen=True):
    """Token counts. The prompt's length is the tokens computed plus those read from a cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class AnthropicMessage(Struct, frozen=True):
    """Answer of `/v1/messages`."""

    id: str
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(Struct, frozen=True):
    """Answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class TextPiece(Struct, frozen=True, tag="text_delta"):
    """More text of a block."""

    text: str


class ThinkingPiece(Struct, frozen=True, tag="thinking_delta"):
    """More reasoning of a block."""

    thinking: str


class InputPiece(Struct, frozen=True, tag="input_json_delta"):
    """More of the JSON text of a call's input."""

    partial_json: str


class MessageEnding(Struct, frozen=True):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageStart(Struct, frozen=True, tag="message_start"):
    """The first event: a message without content."""

    message: AnthropicMessage


class Ping(Struct, frozen=True, tag="ping"):
    """The connection is alive."""


class BlockStart(Struct, frozen=True, tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: ContentBlock


class BlockDelta(Struct, frozen=True, tag="content_block_delta"):
    """More of the open block."""

    index: int
    delta: TextPiece | ThinkingPiece | InputPiece


class BlockStop(Struct, frozen=True, tag="content_block_stop"):
    """The block is complete."""

    index: int


class EndDelta(Struct, frozen=True, tag="message_delta"):
    """Why the message ended, and its token counts."""

    delta: MessageEnding
    usage: MessageUsage


class MessageStop(Struct, frozen=True, tag="message_stop"):
    """The last event."""


AnthropicEvent = (
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | EndDelta | MessageStop
    | AnthropicError
)  # fmt: skip
