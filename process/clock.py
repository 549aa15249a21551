"""Wall-clock time that never goes backwards within a process.

All times that a process compares, and those that it tells other processes of the fleet, are
readings of this clock: it goes on evenly when somebody sets the system clock. What leaves the fleet
is moved to the system clock by `clock_step_us`. Code that measures durations uses `time.monotonic`.
A process passes a `Clock` to its parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_NS_PER_US = 1000
_LEAST_STEP_US = 1_000_000
_anchor_ns = max(time.time_ns() - time.monotonic_ns() for _ in range(10))
"""The largest of several differences between the clocks. A wait for a core between two readings
makes a difference smaller."""


def wall_us() -> int:
    """Microseconds of the Unix epoch: the wall clock at import plus monotonic time since then."""
    return (_anchor_ns + time.monotonic_ns()) // _NS_PER_US


def clock_step_us() -> int:
    """The system clock minus `wall_us`, in microseconds: how far the system clock was set, or how
    long the machine slept, since import. 0 if that is less than a second."""
    step_us = time.time_ns() // _NS_PER_US - wall_us()
    return step_us if abs(step_us) >= _LEAST_STEP_US else 0


class Clock:
    """`now` returns seconds of the monotonic clock, which also measures steps."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now

    def wall_us(self, monotonic_s: float | None = None) -> int:
        """Microseconds of the Unix epoch, now or at a reading of `now`."""
        ago_s = 0.0 if monotonic_s is None else self.now() - monotonic_s
        return wall_us() - round(ago_s * 1e6)
