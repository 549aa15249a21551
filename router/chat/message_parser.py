"""Converts the text of one choice to the events of its message.

Reasoning comes first, then content and tool calls. Reasoning and calls are only parsed if there is
a parser for them; other text is content, unchanged.
"""

from __future__ import annotations

from router.chat.events import (
    ContentText,
    MessageDelta,
    MessageEvent,
    MessageFinish,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolEvent,
)
from router.chat.reasoning import ReasoningParser
from router.chat.tool_parser import ToolParser
from router.requests.output_text import TextDelta


class MessageParser:
    """The parser state of one choice. Calls beyond `max_calls` are dropped."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._called = False
        self._length = 0
        self._has_content = False

    def push(self, delta: TextDelta) -> MessageDelta:
        """The events of a delta; `finish` also releases all text that was held back."""
        events: list[MessageEvent] = []
        self._length += len(delta.text)
        content = self._split(delta.text, events)
        if content:
            self._add_content(content, events)
        if delta.finish is None:
            return MessageDelta(events)
        self._flush(events)
        finish: MessageFinish = delta.finish.value
        return MessageDelta(events, "tool_calls" if self._called and finish == "stop" else finish)

    def _split(self, text: str, events: list[MessageEvent]) -> str:
        """Adds reasoning to the events; returns the rest of the text."""
        if self._reasoning is None:
            return text
        reasoning, content = self._reasoning.push(text)
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

    def _flush(self, events: list[MessageEvent]) -> None:
        if self._reasoning is not None:
            reasoning, content = self._reasoning.flush()
            if reasoning:
                events.append(ReasoningText(reasoning))
            if content:
                self._add_content(content, events)
        if self._tools is not None:
            events += self._counted(self._tools.flush())

    def _counted(self, events: list[ToolEvent]) -> list[ToolEvent]:
        """The events without those of calls beyond `max_calls`."""
        kept: list[ToolEvent] = []
        for event in events:
            if isinstance(event, ToolCallBegin | ToolCallArguments):
                self._called = True
                if self._max_calls is not None and event.index >= self._max_calls:
                    continue
            kept.append(event)
        return kept
