"""The CPU cores that a process runs on: naming them and pinning threads to them.

Only cores that this process may use count; in a container these are fewer than the host has. Does
not know which worker should run where.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from protocol.errors import ConfigError

CORES_PATTERN = r"\d{1,5}(-\d{1,5})?"
"""A core, or a range of cores."""


def usable_cores() -> list[int]:
    """Cores that this process may use, in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def can_keep_to_cores() -> bool:
    """Whether the operating system lets a process choose its cores."""
    return hasattr(os, "sched_setaffinity")


def keep_to_cores(cores: Iterable[int]) -> None:
    """Pin this thread, and the threads and processes that it starts later, to these cores.

    Raises ConfigError if the system cannot pin, or if this process may not use one of the cores.
    """
    wanted, usable = set(cores), usable_cores()
    if not can_keep_to_cores():
        raise ConfigError("cores: this operating system lets no process choose its cores")
    missing = wanted.difference(usable)
    if missing:
        raise ConfigError(
            f"cores: {','.join(ranges_of(missing))} cannot be used here; "
            f"usable are {','.join(ranges_of(usable))}"
        )
    os.sched_setaffinity(0, wanted)


def cores_in(ranges: Sequence[str]) -> list[int]:
    """The cores named by texts of CORES_PATTERN, in ascending order. Raises ConfigError."""
    cores: set[int] = set()
    for text in ranges:
        first, _, last = text.partition("-")
        span = range(int(first), int(last or first) + 1)
        if not span:
            raise ConfigError(f"cores: the range {text} ends before it begins")
        cores.update(span)
    return sorted(cores)


def ranges_of(cores: Iterable[int]) -> tuple[str, ...]:
    """The shortest texts of CORES_PATTERN that name these cores."""
    spans: list[list[int]] = []
    for core in sorted(set(cores)):
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return tuple(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)
