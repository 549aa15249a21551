"""Wall-clock time that never goes backwards within a process.

Only readings of this clock leave a process (to compare traces of several processes). Code that
measures durations uses `time.monotonic`. A process passes a `Clock` to its parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_NS_PER_US = 1000
_anchor_ns = max(time.time_ns() - time.monotonic_ns() for _ in range(10))
"""The largest of several differences between the clocks. A wait for a core between two readings
makes a difference smaller."""


def wall_us() -> int:
    """Microseconds of the Unix epoch: the wall clock at import plus monotonic time since then."""
    return (_anchor_ns + time.monotonic_ns()) // _NS_PER_US


class Clock:
    """`now` returns seconds of the monotonic clock, which also measures steps."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now

    def wall_us(self, monotonic_s: float | None = None) -> int:
        """Microseconds of the Unix epoch, now or at a reading of `now`."""
        ago_s = 0.0 if monotonic_s is None else self.now() - monotonic_s
        return wall_us() - round(ago_s * 1e6)
