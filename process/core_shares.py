"""Which cores each worker of a fleet on this host keeps to, so that they do not fight over them.

Knows nothing of workers but how many there are and how many threads each computes with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def core_shares(cores: Sequence[int], num_workers: int, threads: int) -> list[list[int]]:
    """Cores for each worker, disjoint, neighbours in `cores` together; what remains is nobody's.

    Empty if there is nobody to keep apart, or if there are fewer cores than threads.
    """
    size = len(cores) // num_workers
    if num_workers < 2 or size < threads:
        return []
    return [list(cores[i * size : (i + 1) * size]) for i in range(num_workers)]


def by_neighbourhood(cores: Sequence[int], topology: Path = _TOPOLOGY) -> list[int]:
    """The same cores, those of one package together, and in it the threads of one physical core.

    As they are numbered where the system (Linux's /sys) does not tell.
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
