"""The ranks of a worker's cards share a file where their process groups meet, and no memory.

Each rank has its own pool, on its own card. A step that hangs on a card raises in no process: a
watch of the head notices it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

import torch

from engine.checkpoint.shard import Shard
from engine.parallel.grouped_ranks import grouped_ranks
from engine.parallel.process_groups import RankGroups
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import RankSizes
from engine.parallel.step_watch import StepWatch
from worker.ranks.link import Place

FIRST_PASSES_S = 600.0
"""How long a rank waits for another in passes that no `StepWatch` looks after: in the first ones,
each rank compiles kernels by itself."""


class CardRanks:
    """The head's side. `devices` are the devices of all ranks, by their numbers. Ranks with equal
    devices share one, which only tests do. `wanted`: how cards add up. `lost` is called from
    another thread when a step takes longer than `silence_s`."""

    def __init__(
        self,
        devices: Sequence[str],
        wanted: str,
        lost: Callable[[str], None],
        silence_s: float,
    ) -> None:
        self.file = os.memfd_create("baton-ranks")
        self.place = Place(0, 0)
        self.sizes = RankSizes(len(devices), 1, 0)
        self._devices = devices
        self._wanted = wanted
        self._watch = StepWatch(silence_s, lost)
        self._groups: RankGroups | None = None

    def ranks(
        self, own: Shard, links: Sequence[socket.socket], on_loaded: Callable[[], None]
    ) -> Ranks:
        """The ranks, seen from the head. `on_loaded` is called once all have loaded."""
        self._groups = groups_of(own, self._devices, self.file, self._wanted)
        self._watch.start()
        return grouped_ranks(self._groups, links, on_loaded, self._watch)

    def stop(self) -> None:
        """Do nothing: ranks that wait on their cards end with their processes."""

    def close(self) -> None:
        """Leave the groups after the hands have left them, and release the file."""
        self._watch.close()
        if self._groups is not None:
            self._groups.close()
        os.close(self.file)


def groups_of(shard: Shard, devices: Sequence[str], file: int, wanted: str) -> RankGroups:
    """The groups, not open yet, from the view of the rank with `shard`; see CardRanks."""
    sharing = max(devices.count(each) for each in devices)
    device = torch.device(devices[shard.number])
    return RankGroups(shard, device, file, FIRST_PASSES_S, sharing, wanted)
