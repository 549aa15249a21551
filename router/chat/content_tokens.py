"""Which of an answer's tokens its content consists of, and not its reasoning or its calls.

Tokens know where their texts lie in the output, and content where it ends there. A token that
begins in one and ends in another part counts as content.
"""

from __future__ import annotations

from collections import deque

from router.chat.events import ContentText, MessageEvent
from router.requests.output_text import OutputToken, TextDelta


class ContentTokens:
    """The tokens of one message that wait for what is said of them."""

    def __init__(self) -> None:
        self._waiting: deque[OutputToken] = deque()

    def add(self, delta: TextDelta) -> None:
        """More of the output, before its events."""
        self._waiting.extend(delta.tokens)

    def of(self, event: MessageEvent) -> list[OutputToken]:
        """The tokens of the next event; none unless that is content."""
        if not isinstance(event, ContentText):
            return []
        begin, end = event.end - len(event.text), event.end
        passed: list[OutputToken] = []
        while self._waiting and self._waiting[0].start < end:
            passed.append(self._waiting.popleft())
        return [each for each in passed if each.end > begin or each.start >= begin]
