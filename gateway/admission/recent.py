"""Counts events of the last seconds in a fixed amount of memory."""

from __future__ import annotations

WINDOW_S = 10


class RecentCount:
    """Counts by whole seconds; `now` is the time of any monotonic clock, in seconds."""

    __slots__ = ("_counts", "_second")

    def __init__(self) -> None:
        self._counts = [0] * WINDOW_S
        self._second = 0

    def add(self, now: float, count: int = 1) -> None:
        """Note `count` events."""
        if int(now) != self._second:
            self._advance(now)
        self._counts[self._second % WINDOW_S] += count

    def total(self, now: float) -> int:
        """The number of events in the last `WINDOW_S` seconds."""
        self._advance(now)
        return sum(self._counts)

    def _advance(self, now: float) -> None:
        second = int(now)
        for each in range(self._second + 1, min(second, self._second + WINDOW_S) + 1):
            self._counts[each % WINDOW_S] = 0
        self._second = second
