"""How long the threads of a process were ready to run but had no core, as the kernel counts it.

On a busy machine, this time explains waits, which then say nothing about attacks. On an idle one, a
process that waits for cores waits for its own threads, so nothing is subtracted.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_MOST_LOAD = 0.5


def is_busy() -> bool:
    """Whether something else runs on this machine. Ask before anything of the suite runs."""
    return os.getloadavg()[0] > _MOST_LOAD


def core_waits(*pids: int) -> dict[str, int]:
    """Nanoseconds without a core so far, by process and thread. Empty where the kernel does not
    say."""
    waits: dict[str, int] = {}
    for pid in pids:
        for stats in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError, ValueError):  # the thread has ended
                waits[f"{pid}/{stats.parent.name}"] = int(stats.read_text().split()[1])
    return waits


def longest_wait_s(before: dict[str, int], now: dict[str, int]) -> float:
    """The longest time, in seconds, that one thread had no core between two readings."""
    waits = (nanoseconds - before.get(thread, nanoseconds) for thread, nanoseconds in now.items())
    return max(waits, default=0) / 1e9
