"""Which of an answer's tokens its content consists of, and not its reasoning or its calls.

Tokens know where their texts lie in the output; what a message's parser tells of it, in order, is
found there again, but for what the parser rewrote. A token that begins in one and ends in another
part counts as content.
"""

from __future__ import annotations

from collections import deque

from router.chat.events import ContentText, MessageEvent, ToolCallBegin
from router.output import OutputToken, TextDelta


class ContentTokens:
    """State of one message: its output behind the last event, and the tokens that wait for it."""

    def __init__(self) -> None:
        self._text = ""
        self._start = 0
        self._waiting: deque[OutputToken] = deque()

    def add(self, delta: TextDelta) -> None:
        """More of the output, before its events."""
        self._text += delta.text
        self._waiting.extend(delta.tokens)

    def of(self, event: MessageEvent) -> list[OutputToken]:
        """The tokens of the next event; none unless that is content."""
        text = event.name if isinstance(event, ToolCallBegin) else event.text
        place = self._text.find(text)
        if place < 0:
            return []
        begin, end = self._start + place, self._start + place + len(text)
        self._text, self._start = self._text[place + len(text) :], end
        is_content = isinstance(event, ContentText)
        passed: list[OutputToken] = []
        while self._waiting and self._waiting[0].start < end:
            if not is_content and self._waiting[0].end > end:
                break
            passed.append(self._waiting.popleft())
        if not is_content:
            return []
        return [each for each in passed if each.end > begin or each.start >= begin]
