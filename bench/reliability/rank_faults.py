"""Faults of one rank of a worker whose model is split: its process is killed, or stands still.

The worker has to end by itself each time, and its other ranks with it. Knows no requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from bench.tools.fleet import BenchFleet

NOTICED_S = 60.0
"""How long a worker may take to end after a fault of a rank: it notices one that stands still by
the next step."""
_END_S = 10.0
_ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class Layout:
    """How a worker's model is split: `stages` of `ranks` each."""

    ranks: int
    stages: int

    @classmethod
    def parse(cls, text: str) -> Layout:
        """From RANKSxSTAGES, as 2x1. Raises ValueError."""
        ranks, stages = map(int, text.split("x"))
        return cls(ranks, stages)

    @property
    def is_split(self) -> bool:
        """Whether a worker has several processes."""
        return self.ranks * self.stages > 1

    @property
    def flags(self) -> tuple[str, str]:
        """The worker's flags."""
        return f"--tensor-parallel={self.ranks}", f"--pipeline-parallel={self.stages}"


def hands_of(pid: int) -> list[psutil.Process]:
    """The processes of a running worker's other ranks, by rank."""
    children = psutil.Process(pid).children()
    hands = [each for each in children if "worker.ranks.hand" in each.cmdline()]
    return sorted(hands, key=lambda each: each.create_time())


class RankFaults:
    """Faults of ranks of a fleet's workers, which it restarts."""

    def __init__(self, fleet: BenchFleet, rng: random.Random) -> None:
        self._fleet = fleet
        self._rng = rng
        self._seen: set[psutil.Process] = set()

    def note_hands(self) -> None:
        """Remember the ranks that run now."""
        for name in (name for role in _ROLES for name in self._fleet.names(role)):
            self._seen.update(hands_of(self._fleet.pids[name]))

    def num_left(self) -> int:
        """Ranks that still run after all workers have ended."""
        _, alive = psutil.wait_procs(list(self._seen), _END_S)
        return len(alive)

    def kill(self, role: str) -> None:
        """Kill a rank of a worker of this role."""
        self._lose(role, psutil.Process.kill)

    def stop(self, role: str) -> None:
        """Stop a rank of a worker of this role, for good."""
        self._lose(role, psutil.Process.suspend)

    def _lose(self, role: str, fault: Callable[[psutil.Process], None]) -> None:
        name = self._rng.choice(self._fleet.names(role))
        hands = hands_of(self._fleet.pids[name])
        fault(self._rng.choice(hands))
        if self._fleet.wait_end(name, NOTICED_S) != 1:
            raise RuntimeError(f"{name} did not end because of a rank")
        if psutil.wait_procs(hands, _END_S)[1]:
            raise RuntimeError(f"{name} has left ranks behind")
        self._fleet.start(name)
