"""The offset of a worker's wall clock from ours, from the times of pings and pongs.

A worker stamps a pong between our sending of the ping and our receipt of the pong, so each round
trip bounds the offset from both sides. The offset lies in the intersection of the last round trips'
bounds (Marzullo, 1984). A worker answers between two steps, so single round trips may be long, but
the intersection is narrow. Clocks within these bounds count as equal, because the first round trips
to a starting worker are long and say little. Knows no clock.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW = 16


class ClockReading(NamedTuple):
    """A worker's clock minus ours, and the largest error of that, in microseconds."""

    offset_us: int
    error_us: int


class ClockOffset:
    """The offset of one worker's clock."""

    def __init__(self) -> None:
        self._bounds: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self.reading: ClockReading | None = None
        """The latest reading; None before the first round trip."""

    @property
    def offset_us(self) -> int:
        """The worker's clock minus ours; 0 before the first measurement."""
        return 0 if self.reading is None else self.reading.offset_us

    def observe(self, sent_us: int, answered_us: int, received_us: int) -> None:
        """Take a round trip: a ping was sent and answered at these times of our clock;
        `answered_us` is the worker's stamp."""
        low, high = answered_us - received_us, answered_us - sent_us
        if low > high:
            return
        self._bounds.append((low, high))
        lowest, highest = self._intersection()
        if lowest > highest:  # a clock was set: former bounds no longer hold
            self._bounds.clear()
            self._bounds.append((low, high))
            lowest, highest = low, high
        offset_us = 0 if lowest <= 0 <= highest else (lowest + highest) // 2
        self.reading = ClockReading(offset_us, max(highest - offset_us, offset_us - lowest))

    def _intersection(self) -> tuple[int, int]:
        return max(low for low, _ in self._bounds), min(high for _, high in self._bounds)
