"""Finding stop strings in text that arrives in pieces.

Text that may be the beginning of a stop string is held back until the next piece decides. Of
several matches, the one that completes first wins, and of those the longest, so the result does
not depend on how the text is split into pieces. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Scans the text of one sequence. After a match, `matched` is the string and nothing follows.

    With `include_match` the stop string itself belongs to the text.
    """

    def __init__(self, stop_strings: Sequence[str], include_match: bool = False) -> None:
        self._stop_strings = tuple(stop_strings)
        self._include_match = include_match
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Text that is now certain to belong to the output; ends at a match."""
        if not self._stop_strings:
            return piece
        text = self._held + piece
        match = self._first_match(text)
        if match is not None:
            start, self.matched = match
            self._held = ""
            return text[: start + (len(self.matched) if self._include_match else 0)]
        held = self._possible_start(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The text held back, once no more text can complete a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), stop) for stop in self._stop_strings]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _possible_start(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
        longest = max(len(stop) for stop in self._stop_strings) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop_strings):
                return length
        return 0
