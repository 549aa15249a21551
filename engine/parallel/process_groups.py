"""Torch's process groups of a worker's ranks: of all ranks, and of each stage.

NCCL connects ranks that have a card each, gloo ranks on CPUs and ranks that share a card, which
NCCL refuses. Ranks meet in a file that only they have open, so meeting needs no port. NCCL and gloo
open ports of their own, without keys or encryption: they are bound to the loopback interface unless
the environment names another one. A process is in the groups of one worker at a time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.checkpoint.shard import Shard
from engine.parallel.sums import RankLost
from engine.parallel.symmetric_sums import (
    AUTO,
    NCCL,
    SYMMETRIC,
    ChosenSums,
    SymmetricSums,
    measured,
    why_not_reached,
)
from protocol.errors import ConfigError

logger = logging.getLogger(__name__)

GLOO = "gloo"
ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "=lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Set where the environment says nothing else. `=lo` is the interface of exactly this name. Torch's
own monitor would end a process that captures graphs for long; `StepWatch` takes its place."""


def bind_to_loopback(environment: MutableMapping[str, str]) -> None:
    """Let NCCL and gloo open ports on the loopback interface only, unless the environment names
    another one. Call it before the groups open."""
    for name, value in ENVIRONMENT.items():
        environment.setdefault(name, value)


class RankGroups:
    """The process groups, from the view of the rank with `shard`, whose tensors are on `device`."""

    def __init__(
        self,
        shard: Shard,
        device: torch.device,
        file: int,
        limit_s: float,
        sharing: int = 1,
        wanted: str = AUTO,
    ) -> None:
        """`file` is open in all ranks and empty before the first one opens the groups. `limit_s`:
        how long a rank waits for the others. `sharing`: ranks that share the device's memory.
        `wanted`: how cards add up, AUTO, NCCL or SYMMETRIC."""
        self.shard = shard
        self.device = device
        self.sharing = sharing
        self.backend = NCCL if device.type == "cuda" and sharing == 1 else GLOO
        self._file = file
        self._limit_s = limit_s
        self._wanted = wanted
        self._stages: list[dist.ProcessGroup | None] = []
        self._symmetric: tuple[SymmetricSums, ChosenSums] | None = None

    @property
    def is_captured(self) -> bool:
        """Whether graphs can capture what these groups do."""
        return self.backend == NCCL

    @property
    def is_staged(self) -> bool:
        """Whether tensors go through host memory: gloo reaches no card."""
        return self.backend == GLOO and self.device.type == "cuda"

    @property
    def is_open(self) -> bool:
        """Whether `open` has succeeded and `close` was not called."""
        return bool(self._stages)

    @property
    def stage(self) -> dist.ProcessGroup:
        """The ranks of this rank's stage."""
        group = self._stages[self.shard.stage]
        assert group is not None
        return group

    def open(self) -> None:
        """Meet the other ranks, which all call this. Raises RankLost."""
        bind_to_loopback(os.environ)
        shard, limit = self.shard, timedelta(seconds=self._limit_s)
        with lost_ranks():
            dist.init_process_group(
                self.backend,
                store=dist.FileStore(f"/proc/self/fd/{self._file}", shard.num_ranks),
                rank=shard.number,
                world_size=shard.num_ranks,
                timeout=limit,
                device_id=self.device if self.backend == NCCL else None,
            )
            self._stages = [
                dist.new_group(_ranks_of(stage, shard), timeout=limit)
                for stage in range(shard.num_stages)
            ]
        logger.info("%d ranks are connected by %s", shard.num_ranks, self.backend)
        if self.backend == NCCL and self._wanted != NCCL and shard.size > 1:
            self._measure()

    def add_up(self, part: torch.Tensor) -> None:
        """Replace a part by the sum of the parts of all ranks of the stage."""
        if self._symmetric is not None and self._symmetric[0].fits(part):
            symmetric, chosen = self._symmetric
            symmetric.ways[chosen.way(part.nbytes)](part)
        else:
            dist.all_reduce(part, group=self.stage)

    def close(self) -> None:
        """Leave the groups without waiting for other ranks: what this rank has queued for them is
        dropped. A second call does nothing."""
        if self.is_open:
            self._stages, self._symmetric = [], None
            if self.backend == NCCL:
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()

    def _measure(self) -> None:
        """Choose how to add up tensors of each size; all ranks choose the same. Raises RankLost,
        and ConfigError if symmetric memory is wanted but not available."""
        reason = why_not_reached(self.device)
        if self._most([float(bool(reason))])[0]:
            reason = reason or "another rank's card cannot map the memory of all cards"
            if self._wanted == SYMMETRIC:
                raise ConfigError(f"card_sums is symmetric, but {reason}; use auto")
            logger.info("sums over ranks by NCCL alone: %s", reason)
            return
        with lost_ranks():
            ways = SymmetricSums(self.stage, self.device)
            chosen = measured(ways.ways, self._wanted, ways.seconds, self._most)
        self._symmetric = ways, chosen
        logger.info("sums over ranks by %s, by NCCL beyond", chosen)

    def _most(self, numbers: Sequence[float]) -> list[float]:
        """The largest of all ranks' numbers, each by itself."""
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        with lost_ranks():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.stage)
        return [float(each) for each in found.tolist()]


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Raise RankLost for errors of torch's process groups."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"a rank of this worker does not answer: {_first_line(error)}") from error


def _ranks_of(stage: int, shard: Shard) -> list[int]:
    ranks = range(shard.size)
    return [Shard(rank, shard.size, stage, shard.num_stages).number for rank in ranks]


def _first_line(error: object) -> str:
    return next(iter(str(error).splitlines()), "")
