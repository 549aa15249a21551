"""The requests for generations of the last minute, counted by key and status.

Every request pays for one count, so this is a dictionary per slot of time, summed when read. An
operator makes the keys, so there are few. Knows no HTTP beyond the numbers; the clock is passed in.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

SLOT_S = 5.0
NUM_SLOTS = 12


class Door:
    """Counts requests by the name of their key ("" without keys) and by status; `clock` returns
    monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots: deque[tuple[float, Counter[tuple[str, int]]]] = deque()

    def count(self, key: str, status: int) -> None:
        """Count a request of this key that was answered with this status; 499: its client left."""
        now = self._clock()
        if not self._slots or now >= self._slots[-1][0] + SLOT_S:
            self._slots.append((now, Counter()))
            self._drop_old(now)
        self._slots[-1][1][key, status] += 1

    def minute(self) -> Counter[tuple[str, int]]:
        """The counts of the last minute by key and status."""
        self._drop_old(self._clock())
        total: Counter[tuple[str, int]] = Counter()
        for _, counts in self._slots:
            total.update(counts)
        return total

    def _drop_old(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= now - NUM_SLOTS * SLOT_S:
            self._slots.popleft()
