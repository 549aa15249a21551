"""Notices that a worker does nothing although requests wait that it could admit. An alarm, no cure.

Pure: the owner says what has happened so far and whether requests wait.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable


class StallWatch:
    """`is_stalled` from `bound_s` after the last progress until the next."""

    def __init__(self, bound_s: float) -> None:
        self.is_stalled = False
        self._bound_s = bound_s
        self._seen: Hashable = None
        self._since = float("inf")

    def look(self, now: float, progress: Hashable, waits: Callable[[], bool]) -> bool:
        """Whether `is_stalled` has changed. `progress` differs after each step, grant or release;
        `waits` says whether requests could be admitted if there were room, and is asked only if
        nothing has happened."""
        if progress != self._seen or not waits():
            self._seen, self._since = progress, now
        was_stalled, self.is_stalled = self.is_stalled, now - self._since >= self._bound_s
        return self.is_stalled != was_stalled
