"""From the text of one choice to the events of its message.

Reasoning comes first, then content and tool calls. Only what was asked for is looked for: without
a parser the text is content as it is.
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
    """State of one choice. With `max_calls`, calls beyond that many are left out."""

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
        """What a delta says; with its `finish` everything that was held back."""
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
        """Adds reasoning to the events; the rest of the text."""
        if self._reasoning is None:
            return text
        reasoning, content = self._reasoning.push(text)
        if reasoning:
            events.append(ReasoningText(reasoning))
        return content

    def _add_content(self, content: str, events: list[MessageEvent]) -> None:
        """What is not reasoning: the end of the text so far, and from here on all of it."""
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
        """Without the calls that are too many."""
        kept: list[ToolEvent] = []
        for event in events:
            if isinstance(event, ToolCallBegin | ToolCallArguments):
                self._called = True
                if self._max_calls is not None and event.index >= self._max_calls:
                    continue
            kept.append(event)
        return kept
