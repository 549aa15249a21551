"""The memory that all ranks of a worker on one host share: for the sums of each stage, for hidden
states between stages, and for the times of each rank. What leaves the host goes by a `HostMesh`.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from engine.checkpoint.shard import Shard
from engine.layers.summed import Sums
from engine.parallel.hidden_states import StageLink, StatesLink
from engine.parallel.host_crossings import CrossingStates, CrossingSums
from engine.parallel.host_mesh import HostMesh
from engine.parallel.ranks import Ranks
from engine.parallel.sums import HostSums, NoSums, stop_sums
from engine.rank_times import LINE_NUMBERS, RankTimes

_PAGE_BYTES = 4096


@dataclass(frozen=True)
class RankSizes:
    """How a worker's ranks share its model: `num_stages` of `tp_size` ranks, which lie on
    `num_hosts` in the order of their numbers, equally many on each. `step_bytes`: the hidden states
    of a full step."""

    tp_size: int
    num_stages: int
    step_bytes: int
    num_hosts: int = 1

    @property
    def num_local(self) -> int:
        """The ranks on each host."""
        return self.tp_size * self.num_stages // self.num_hosts

    def local(self, number: int) -> range:
        """The numbers of the ranks on the host of this one."""
        first = number // self.num_local * self.num_local
        return range(first, first + self.num_local)

    def stage(self, stage: int) -> range:
        """The numbers of a stage's ranks."""
        first = (self.num_stages - 1 - stage) * self.tp_size
        return range(first, first + self.tp_size)

    def firsts(self, stage: int) -> range:
        """The first rank of a stage on each of its hosts."""
        ranks = self.stage(stage)
        return ranks[:: min(self.num_local, self.tp_size)]

    @property
    def num_bytes(self) -> int:
        """The memory that they share."""
        return sum(self._regions())

    def _regions(self) -> list[int]:
        """The bytes for the times of all ranks, for the sums of each stage, and between each two
        stages; whole pages."""
        times = [self.tp_size * self.num_stages * LINE_NUMBERS * 8]
        sums = [HostSums.bytes_for(self.tp_size)] * self.num_stages
        between = [StageLink.bytes_for(self.tp_size, self.step_bytes)] * (self.num_stages - 1)
        return [-(-size // _PAGE_BYTES) * _PAGE_BYTES for size in times + sums + between]

    def split(self, memory: memoryview) -> Sequence[memoryview]:
        """The regions of the memory: for times, for the sums of each stage, between stages."""
        ends = [0, *accumulate(self._regions())]
        return [memory[start:end] for start, end in pairwise(ends)]


class RankMemory:
    """The shared memory, as one rank has mapped it; zeroed before the first rank begins."""

    def __init__(self, kernels: ctypes.CDLL, memory: memoryview, sizes: RankSizes) -> None:
        self._kernels = kernels
        self._sizes = sizes
        times, *self._regions = sizes.split(memory)
        num_lines = sizes.tp_size * sizes.num_stages
        self._times = times[: num_lines * LINE_NUMBERS * 8].cast("q")

    def ranks(
        self,
        shard: Shard,
        links: Sequence[socket.socket],
        limit_s: float,
        mesh: HostMesh | None = None,
    ) -> Ranks:
        """The ranks, seen from the one with this part of the model. `limit_s`: how long it waits
        for another. With several hosts, `mesh` connects them."""
        sends = not shard.is_last_stage and shard.rank == 0
        local = self._local_sums(shard, limit_s)
        return Ranks(
            shard,
            links,
            self._sums(shard, local, mesh),
            None if shard.is_first_stage else self._before(shard, local, limit_s, mesh),
            self._after(shard, limit_s, mesh) if sends else None,
            RankTimes(self._times, shard.number),
            on_host=self._sizes.local(shard.number),
        )

    def times_of(self, numbers: range) -> list[int]:
        """The times of these ranks so far, as `RankTimes.note` takes them."""
        return RankTimes(self._times, numbers.start).lines(numbers)

    def stop(self) -> None:
        """End all waits of all ranks, now and from now on: each raises RankLost."""
        for region in self._regions:
            stop_sums(self._kernels, region)

    def _sums(self, shard: Shard, local: Sums, mesh: HostMesh | None) -> Sums:
        firsts = self._sizes.firsts(shard.stage)
        if len(firsts) == 1:
            return local
        assert mesh is not None
        return CrossingSums(local, mesh, firsts, shard.number)

    def _local_sums(self, shard: Shard, limit_s: float) -> Sums:
        """Those with the ranks of the stage on this host."""
        size = min(self._sizes.num_local, shard.size)
        if size == 1:
            return NoSums()
        region = self._regions[shard.stage]
        return HostSums(self._kernels, region, shard.rank % size, size, limit_s)

    def _before(
        self, shard: Shard, local: Sums, limit_s: float, mesh: HostMesh | None
    ) -> StatesLink:
        sender = self._sizes.stage(shard.stage - 1)[0]
        if sender in self._sizes.local(shard.number):
            return self._link(shard.stage - 1, shard, limit_s)
        assert mesh is not None
        is_first = shard.number in self._sizes.firsts(shard.stage)
        return CrossingStates(mesh, [sender] if is_first else [], local)

    def _after(self, shard: Shard, limit_s: float, mesh: HostMesh | None) -> StatesLink:
        receivers = self._sizes.firsts(shard.stage + 1)
        if receivers[0] in self._sizes.local(shard.number):
            return self._link(shard.stage, shard, limit_s)
        assert mesh is not None
        return CrossingStates(mesh, receivers)

    def _link(self, after_stage: int, shard: Shard, limit_s: float) -> StageLink:
        region = self._regions[self._sizes.num_stages + after_stage]
        return StageLink(self._kernels, region, shard.size, shard.rank, limit_s)
