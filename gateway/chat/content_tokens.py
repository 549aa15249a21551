"""Finds the tokens of an answer's content, as opposed to its reasoning and its calls.

Tokens carry the position of their text in the output, and content events their end position. A
token that spans content and another part counts as content.
"""

from __future__ import annotations

from collections import deque

from gateway.chat.message_events import ContentText, MessageEvent
from gateway.output.output_text import OutputToken, TextDelta


class ContentTokens:
    """The tokens of one message that have not been assigned to an event yet."""

    def __init__(self) -> None:
        self._waiting: deque[OutputToken] = deque()

    def add(self, delta: TextDelta) -> None:
        """Adds more output. Call this before `of` with the events of the same delta."""
        self._waiting.extend(delta.tokens)

    def of(self, event: MessageEvent) -> list[OutputToken]:
        """The tokens of the next event; empty unless the event is content."""
        if not isinstance(event, ContentText):
            return []
        begin, end = event.end - len(event.text), event.end
        passed: list[OutputToken] = []
        while self._waiting and self._waiting[0].start < end:
            passed.append(self._waiting.popleft())
        return [each for each in passed if each.end > begin or each.start >= begin]
