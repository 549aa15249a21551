"""The group of an engine's ranks, and the steps that rank 0 announces to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine.attention.base import Segment
from engine.checkpoint.config import Shard


@dataclass(frozen=True)
class Step:
    """The next step of all ranks: segments and their N tokens."""

    segments: Sequence[Segment]
    tokens: Sequence[int]

    @property
    def positions(self) -> list[int]:
        """Positions of the tokens, [N]."""
        spans = [(s.context_len - s.query_len, s.context_len) for s in self.segments]
        return [position for start, end in spans for position in range(start, end)]

    def encode(self) -> torch.Tensor:
        """The step as one row of int64."""
        sizes = [
            (s.query_len, s.context_len, s.wanted_len, len(s.block_table)) for s in self.segments
        ]
        tables = [block for segment in self.segments for block in segment.block_table]
        flat = [number for size in sizes for number in size]
        return torch.tensor([len(sizes), *flat, *tables, *self.tokens], dtype=torch.int64)

    @staticmethod
    def decode(row: torch.Tensor) -> Step:
        """The inverse of `encode`."""
        numbers = row.tolist()
        segments, at = [], 1 + 4 * numbers[0]
        for index in range(1, at, 4):
            query_len, context_len, num_wanted, size = numbers[index : index + 4]
            table = numbers[at : at + size]
            segments.append(Segment(query_len, context_len, table, num_wanted))
            at += size
        return Step(segments, numbers[at:])


@dataclass(frozen=True)
class Ranks:
    """The ranks of one engine, seen from one of them. `control` broadcasts steps from host memory;
    `data` sums on the ranks' devices: an NCCL group on cards, the same as `control` on CPUs."""

    shard: Shard
    control: dist.ProcessGroup
    data: dist.ProcessGroup

    @property
    def leads(self) -> bool:
        """Whether this rank announces the steps that the others wait for."""
        return self.shard.rank == 0

    def announce(self, step: Step | None) -> None:
        """Broadcast the next step to the followers; None ends their loop."""
        row = torch.empty(0, dtype=torch.int64) if step is None else step.encode()
        dist.broadcast(torch.tensor([len(row)]), group=self.control, group_src=0)
        if len(row):
            dist.broadcast(row, group=self.control, group_src=0)

    def next_step(self) -> Step | None:
        """Wait for the step that the leader announces; None if there are no more."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, group=self.control, group_src=0)
        if not size.item():
            return None
        row = torch.empty(int(size.item()), dtype=torch.int64)
        dist.broadcast(row, group=self.control, group_src=0)
        return Step.decode(row)

    def least(self, number: int) -> int:
        """The minimum of the ranks' numbers; all ranks have to call this."""
        least = torch.tensor([number])
        dist.all_reduce(least, dist.ReduceOp.MIN, self.control)
        return int(least.item())
