"""Wall-clock time that never goes backwards within a process.

The only clock that leaves a process (traces of several processes are laid side by side);
everything that measures a duration uses `time.monotonic`.
"""

from __future__ import annotations

import time

_NS_PER_US = 1000
_anchor_ns = time.time_ns() - time.monotonic_ns()


def wall_us() -> int:
    """Microseconds of the Unix epoch: the wall clock at import, advanced by the monotonic one."""
    return (_anchor_ns + time.monotonic_ns()) // _NS_PER_US
