"""Formats one answer of `/v1/messages`, whole or as events, from the message parser's output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from gateway.api.anthropic.answer import (
    AnthropicEvent,
    AnthropicMessage,
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    EndDelta,
    InputPiece,
    MessageEnding,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopReason,
    TextBlock,
    TextPiece,
    ThinkingBlock,
    ThinkingPiece,
    ToolUseBlock,
)
from gateway.api.replies.usage import Usage
from gateway.chat.message_events import (
    ContentText,
    MessageDelta,
    MessageEvent,
    MessageFinish,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallBroken,
    joined_calls,
)
from gateway.chat.message_parser import MessageParser
from gateway.chat.past_calls import arguments_object
from gateway.output.choices import Choice
from gateway.output.output_text import TextDelta
from http_kit.sse import tagged_events


class MessageFormat:
    """See AnswerFormat. A chunk holds all the framed events that one delta produces.

    A block is closed when the next block begins.
    """

    def __init__(self, message_id: str, model: str, parser: MessageParser) -> None:
        self._id = message_id
        self._model = model
        self._parser = parser
        self._num_blocks = 0
        self._open: type[MessageEvent] | None = None
        self._ending = MessageEnding("end_turn", None)

    def chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> bytes:
        """See AnswerFormat."""
        events: list[AnthropicEvent] = []
        if is_first:
            prompt_tokens = len(choice.request.token_ids)
            cached = delta.cached_tokens
            usage = MessageUsage(prompt_tokens - cached, 0, cached)
            message = AnthropicMessage(self._id, self._model, [], None, None, usage)
            events += [MessageStart(message), Ping()]
        parsed = self._parser.push(delta)
        for event in parsed.events:
            events += self._block_events(event)
        if parsed.finish is not None:
            self._ending = _ending(choice, parsed.finish)
            events += self._close()
        return tagged_events(events)

    def long_chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> Iterator[bytes]:
        """See AnswerFormat; messages have no log-probabilities."""
        yield self.chunk(choice, delta, is_first)

    def usage_chunk(self, usage: Usage) -> bytes:
        """See AnswerFormat: the end of the message."""
        return tagged_events([EndDelta(self._ending, _usage(usage)), MessageStop()])

    def answer(self, texts: Sequence[tuple[Choice, TextDelta]], usage: Usage) -> Iterator[bytes]:
        """See AnswerFormat."""
        choice, text = texts[0]
        parsed = self._parser.push(text)
        assert parsed.finish is not None, "it is whole"
        ending = _ending(choice, parsed.finish)
        yield msgspec.json.encode(
            AnthropicMessage(
                self._id,
                self._model,
                _blocks(parsed),
                ending.stop_reason,
                ending.stop_sequence,
                _usage(usage),
            )
        )

    def _block_events(self, event: MessageEvent) -> list[AnthropicEvent]:
        """The event as block events, in a block of its kind; every call has its own block."""
        if isinstance(event, ToolCallBroken):
            return []  # `stop_reason` says so
        if isinstance(event, ToolCallBegin):
            block = ToolUseBlock(_tool_use_id(event.id), event.name, {})
            return self._begin(ToolCallArguments, block)
        begin: list[AnthropicEvent] = []
        piece: TextPiece | ThinkingPiece | InputPiece
        if isinstance(event, ContentText):
            begin, piece = self._ensure(ContentText, TextBlock("")), TextPiece(event.text)
        elif isinstance(event, ReasoningText):
            begin = self._ensure(ReasoningText, ThinkingBlock(""))
            piece = ThinkingPiece(event.text)
        else:
            piece = InputPiece(event.text)
        return [*begin, BlockDelta(self._num_blocks - 1, piece)]

    def _ensure(self, kind: type[MessageEvent], empty: ContentBlock) -> list[AnthropicEvent]:
        return [] if self._open is kind else self._begin(kind, empty)

    def _begin(self, kind: type[MessageEvent], empty: ContentBlock) -> list[AnthropicEvent]:
        closing = self._close()
        self._open = kind
        self._num_blocks += 1
        return [*closing, BlockStart(self._num_blocks - 1, empty)]

    def _close(self) -> list[AnthropicEvent]:
        if self._open is None:
            return []
        self._open = None
        return [BlockStop(self._num_blocks - 1)]


def _ending(choice: Choice, finish: MessageFinish) -> MessageEnding:
    matched = choice.output.matched_stop
    reasons: dict[MessageFinish, StopReason] = {
        "stop": "end_turn" if matched is None else "stop_sequence",
        "length": "max_tokens",
        "tool_calls": "tool_use",
    }
    return MessageEnding(reasons[finish], matched if finish == "stop" else None)


def _blocks(message: MessageDelta) -> list[ContentBlock]:
    """The blocks in the order of the events, as they are streamed."""
    blocks: list[ContentBlock] = []
    for _, events in groupby(message.events, _block_of):
        part = MessageDelta(list(events))
        if part.reasoning:
            blocks.append(ThinkingBlock(part.reasoning))
        if part.content:
            blocks.append(TextBlock(part.content))
        for call in joined_calls(part.events):
            assert call.begin is not None, "the message is whole"
            arguments = arguments_object(call.arguments, "input")
            blocks.append(ToolUseBlock(_tool_use_id(call.begin.id), call.begin.name, arguments))
    return blocks


def _block_of(event: MessageEvent) -> object:
    """The fields that all events of one block share."""
    return type(event) if isinstance(event, ContentText | ReasoningText) else event.index


def _tool_use_id(call_id: str) -> str:
    """A call's id with the prefix of Anthropic's API."""
    return f"toolu_{call_id.removeprefix('call_')}"


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)
