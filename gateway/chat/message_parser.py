"""Converts the text of one choice to the events of its message.

Reasoning comes first, then content and tool calls. Reasoning and calls are only parsed if there is
a parser for them; other text is content, unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from gateway.chat.message_events import (
    ContentText,
    MessageDelta,
    MessageEvent,
    MessageFinish,
    ReasoningText,
    ToolCallBroken,
    ToolEvent,
)
from gateway.chat.reasoning_parser import ReasoningParser
from gateway.chat.tool_parser import CallParser
from gateway.output.output_text import TextDelta
from protocol.messages import FinishReason


class MessageParser:
    """The parser state of one choice. Calls beyond `max_calls` are dropped."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: CallParser | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._called = False
        self._is_broken = False
        self._length = 0
        self._has_content = False

    def push_plain(self, delta: TextDelta) -> str | None:
        """The text of a delta if it is only content, as in most deltas; None if `push` must parse
        it."""
        if self._reasoning is None and self._tools is None and delta.finish is None:
            self._length += len(delta.text)
            return delta.text
        return None

    def push(self, delta: TextDelta) -> MessageDelta:
        """The events of a delta; `finish` also releases all text that was held back."""
        events: list[MessageEvent] = []
        self._length += len(delta.text)
        content = delta.text if self._reasoning is None else self._split(delta.text, events)
        if content:
            self._add_content(content, events)
        if delta.finish is None:
            return MessageDelta(events)
        self._flush(events, is_cut=delta.finish is FinishReason.LENGTH)
        finish: MessageFinish = delta.finish.value
        if finish == "stop" and self._called and not self._is_broken:
            finish = "tool_calls"
        return MessageDelta(events, finish)

    def _split(self, text: str, events: list[MessageEvent]) -> str:
        """Adds reasoning to the events; returns the rest of the text."""
        parser = self._reasoning
        assert parser is not None
        reasoning, content = parser.push(text)
        if parser.is_over:
            self._reasoning = None
        if reasoning:
            events.append(ReasoningText(reasoning))
        return content

    def _add_content(self, content: str, events: list[MessageEvent]) -> None:
        """Adds text after the reasoning. `content` is the end of the text received so far."""
        if self._tools is None:
            events.append(ContentText(content, self._length))
            return
        if not self._has_content:
            self._has_content = True
            self._tools.begin_at(self._length - len(content))
        events += self._counted(self._tools.push(content))

    def _flush(self, events: list[MessageEvent], is_cut: bool) -> None:
        if self._reasoning is not None:
            reasoning, content, may_call = self._reasoning.flush(is_cut)
            if reasoning:
                events.append(ReasoningText(reasoning))
            if content:
                self._add_content(content, events)
            if may_call and self._tools is not None:
                events += self._call_in_thoughts(self._tools, may_call, is_cut)
                return
        if self._tools is not None:
            events += self._counted(self._tools.flush(is_cut))

    def _call_in_thoughts(
        self, tools: CallParser, text: str, is_cut: bool
    ) -> Sequence[MessageEvent]:
        """The events of text at the end of reasoning that was never closed: calls at its very end,
        or else more reasoning. A call that had hardly begun when the token limit was reached is
        dropped."""
        tools.begin_at(self._length - len(text))
        found = [*tools.push(text), *tools.flush(is_cut)]
        contents = list(takewhile(lambda event: isinstance(event, ContentText), found))
        calls = found[len(contents) :]
        if calls and not any(isinstance(event, ContentText) for event in calls):
            thoughts = MessageDelta([*contents]).content
            return [*([ReasoningText(thoughts)] if thoughts else []), *self._counted(calls)]
        return [] if is_cut and not calls else [ReasoningText(text)]

    def _counted(self, events: list[ToolEvent]) -> list[ToolEvent]:
        """The events without those of calls beyond `max_calls`."""
        kept: list[ToolEvent] = []
        for event in events:
            if not isinstance(event, ContentText | ReasoningText):
                self._called = True
                if self._max_calls is not None and event.index >= self._max_calls:
                    continue
                self._is_broken |= isinstance(event, ToolCallBroken)
            kept.append(event)
        return kept
