"""Finds the end of one JSON value in text that arrives in pieces.

This only tracks strings and brackets; the caller decodes the rest. So the end does not depend on
where the text is split, and no text is read twice.
"""

from __future__ import annotations

_CLOSER_OF = {"{": "}", "[": "]"}
_SCALAR_END = frozenset(",]} \t\r\n")


class JsonValue:
    """One value, which begins at the first character given (no leading white space).

    `complete` is set once the value is whole, `broken` if its brackets do not match.
    """

    def __init__(self) -> None:
        self.complete = False
        self.broken = False
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self._is_scalar = False

    def scan(self, text: str, start: int) -> int:
        """Scans `text` from `start`; returns the index after the part that is in the value."""
        for place in range(start, len(text)):
            belongs = self._take(text[place])
            if self.complete or self.broken:
                return place + 1 if belongs else place
        return len(text)

    def _take(self, character: str) -> bool:
        """Takes a character; returns whether it belongs to the value."""
        if self._in_string:
            self._take_in_string(character)
            return True
        if self._is_scalar:
            self.complete = character in _SCALAR_END
            return not self.complete
        if character == '"':
            self._in_string = True
        elif character in _CLOSER_OF:
            self._closers.append(_CLOSER_OF[character])
        elif character in "]}":
            self.broken = not self._closers or self._closers.pop() != character
            self.complete = not self.broken and not self._closers
            return not self.broken
        elif not self._closers:
            self._is_scalar = True
        return True

    def _take_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            self.complete = not self._closers
