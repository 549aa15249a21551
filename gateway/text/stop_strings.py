"""Finds stop strings in text that arrives in pieces.

Text that may be the beginning of a stop string is held back until the next piece decides. Of
several matches, the one that completes first wins, and of those the longest, so the result does not
depend on how the text is split into pieces. Knows nothing of tokens.

In an answer that may call tools, stop strings count only in content: one in the name or the
arguments of a call ends nothing. A `ContentScan`, which knows the format of calls, finds the
content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Found = tuple[str, int]
"""Content, and its end in the text, in characters."""


class StopMatcher:
    """Scans the text of one sequence. After a match, `matched` is the string, and no text follows.

    With `include_match` the stop string itself belongs to the text.
    """

    def __init__(self, stop_strings: Sequence[str], include_match: bool = False) -> None:
        self._stop_strings = tuple(stop_strings)
        self._include_match = include_match
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Text that certainly belongs to the output; ends at a match."""
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

    def skip(self, piece: str) -> str:
        """Pass text through without searching it. Only before the first `push`."""
        return piece

    def flush(self, is_cut: bool = False) -> str:
        """The text held back, once no more text can complete a stop string. `is_cut` makes no
        difference for plain text."""
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
        return max(_overlap(text, stop) for stop in self._stop_strings)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0


class ContentScan(Protocol):
    """Separates content from calls. Content without interruption is contiguous in the text."""

    def push(self, text: str) -> Sequence[Found | None]:
        """The new certain parts after more text: content, or None for a part of a call."""
        ...

    def flush(self, is_cut: bool) -> Sequence[Found | None]:
        """The rest, at the end of the text; `is_cut` if the token limit ended it."""
        ...


class ContentStops:
    """Scans the text of one sequence that may call tools; used like a StopMatcher. Text is held
    back until it certainly is content, and not the beginning of a stop string."""

    def __init__(
        self, scan: ContentScan, stop_strings: Sequence[str], include_match: bool = False
    ) -> None:
        self._scan = scan
        self._matcher = StopMatcher(stop_strings, include_match)
        self._include_match = include_match
        self._held = ""
        self._released = 0
        self._certain = 0  # the text up to here holds no stop string
        self._places: list[int] = []  # the places of the characters that the matcher holds back

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matcher.matched

    def push(self, piece: str) -> str:
        """Text that certainly belongs to the output; ends at a match."""
        before = self._released + len(self._held)
        self._held += piece
        self._take(self._scan.push(piece), before)
        return self._release()

    def skip(self, piece: str) -> str:
        """Pass text through without searching it."""
        self._held += piece
        self._scan.push(piece)
        self._certain = self._released + len(self._held)
        return self._release()

    def flush(self, is_cut: bool = False) -> str:
        """The text held back, once there is no more; ends at a match."""
        end = self._released + len(self._held)
        self._take(self._scan.flush(is_cut), end)
        if self.matched is None:
            self._certain = end
        return self._release()

    def _take(self, found: Sequence[Found | None], before: int) -> None:
        for each in found:
            if each is None:  # no stop string spans a call
                self._matcher.flush()
                self._places.clear()
                self._certain = max(self._certain, before)
            else:
                self._match(*each)
            if self.matched is not None:
                return

    def _match(self, text: str, end: int) -> None:
        start = max(end - len(text), self._released)
        if start >= end:
            return
        self._places += range(start, end)
        num_kept = len(self._matcher.push(text[start - end :]))
        if self.matched is None:
            del self._places[:num_kept]
            self._certain = self._places[0] if self._places else end
        elif self._include_match:
            self._certain = self._places[num_kept - 1] + 1
        else:
            self._certain = self._places[num_kept]

    def _release(self) -> str:
        num_chars = self._certain - self._released
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        self._released = self._certain
        if self.matched is not None:
            self._held = ""
        return text
