"""Separates the content of an answer's text from its calls, with the parser of the model's
calls."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.chat.message_events import ContentText, ReasoningText, ToolEvent
from gateway.chat.tool_parser import CallParser
from gateway.text.stop_strings import Found


class ToolContentScan:
    """Implements `gateway.text.stop_strings.ContentScan` and owns `parser`."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Found | None]:
        """See ContentScan."""
        return _found(self._parser.push(text))

    def flush(self, is_cut: bool) -> list[Found | None]:
        """See ContentScan."""
        return _found(self._parser.flush(is_cut))


def _found(events: Iterable[ToolEvent]) -> list[Found | None]:
    return [
        (event.text, event.end) if isinstance(event, ContentText) else None
        for event in events
        if not isinstance(event, ReasoningText)
    ]
