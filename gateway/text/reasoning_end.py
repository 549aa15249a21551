"""Finds where a model's reasoning ends in its output, while the tokens arrive.

Stop strings do not count inside reasoning, and usage tells how many tokens it took. Knows the
markers only; `gateway.chat` splits the text for the client.
"""

from __future__ import annotations

import msgspec


class ThoughtMarkers(msgspec.Struct, frozen=True):
    """The markers of reasoning at the beginning of an output; `is_open` if the prompt already has
    the first one."""

    begin: str
    end: str
    is_open: bool


class ThoughtScan:
    """Scans the text of one sequence, token by token. `num_tokens` counts the tokens of the
    reasoning, including markers; once `is_over`, the rest is the answer."""

    def __init__(self, markers: ThoughtMarkers) -> None:
        self.num_tokens = 0
        self.is_over = False
        self._markers = markers
        self._is_inside = markers.is_open
        self._num_undecided = 0
        self._held = ""
        self._tail = ""  # the end of the reasoning so far, which may be part of a marker

    def push(self, piece: str) -> tuple[str, str]:
        """The text of reasoning and the text of the answer that are certain after one more
        token."""
        begin, end = self._markers.begin, self._markers.end
        self._num_undecided += 1
        if not self._is_inside:
            self._held += piece
            start = self._held.lstrip()
            if begin.startswith(start) and start != begin:
                return "", ""
            if not start.startswith(begin):
                self.is_over = True
                return "", self.flush()
            self._is_inside = True
            piece = self.flush()
        self.num_tokens += self._num_undecided
        self._num_undecided = 0
        text = self._tail + piece
        found = text.find(end)
        if found >= 0:
            self.is_over = True
            cut = found + len(end) - len(self._tail)
            return piece[:cut], piece[cut:]
        self._tail = text[1 - len(end) :]
        return piece, ""

    def flush(self) -> str:
        """The text held back."""
        held, self._held = self._held, ""
        return held
