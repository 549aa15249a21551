"""Wall-clock time that never goes backwards within a process.

The only clock whose readings leave a process (to compare traces of several processes); code that
measures durations uses `time.monotonic`.
"""

from __future__ import annotations

import time

_NS_PER_US = 1000
_anchor_ns = max(time.time_ns() - time.monotonic_ns() for _ in range(10))
"""The largest difference: a wait for a core between the two readings makes it smaller."""


def wall_us() -> int:
    """Microseconds of the Unix epoch: the wall clock at import plus monotonic time since then."""
    return (_anchor_ns + time.monotonic_ns()) // _NS_PER_US
