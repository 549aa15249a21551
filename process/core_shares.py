"""Divides the cores of this host among the workers of a fleet, so that they do not compete.

Knows only the number of workers and the number of compute threads of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def core_shares(cores: Sequence[int], num_workers: int, threads: int) -> list[list[int]]:
    """Disjoint cores for each worker, each share contiguous in `cores`; the remainder is unused.
    Empty if there is only one worker, or if a share would have fewer cores than `threads`."""
    size = len(cores) // num_workers
    if num_workers < 2 or size < threads:
        return []
    return [list(cores[i * size : (i + 1) * size]) for i in range(num_workers)]


def by_neighbourhood(cores: Sequence[int], topology: Path = _TOPOLOGY) -> list[int]:
    """The same cores, grouped by package and then by physical core.

    If the system (Linux's /sys) does not report the topology, the cores are sorted by number.
    """

    def place(core: int) -> tuple[int, int, int]:
        folder = topology / f"cpu{core}" / "topology"
        try:
            package = int((folder / "physical_package_id").read_text())
            physical = int((folder / "core_id").read_text())
        except (OSError, ValueError):
            return 0, core, core
        return package, physical, core

    return sorted(cores, key=place)
