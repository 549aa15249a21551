"""Sums over a stage's ranks by torch's process groups: on cards, or wherever gloo runs.

On cards every method queues work on the current stream and returns; the host waits for nothing. All
ranks of a stage queue the same sums in the same order, on one stream, and graphs may capture them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist

from engine.parallel.process_groups import RankGroups, lost_ranks


class GroupSums:
    """The `Sums` of a rank of `groups`, which are open before the first sum."""

    address: int | None = None
    waited_ns = 0

    def __init__(self, groups: RankGroups) -> None:
        self.rank = groups.shard.rank
        self._groups = groups

    def add_up(self, part: torch.Tensor) -> None:
        """See Sums."""
        assert part.is_contiguous()
        if part.numel():
            with self._on_host(part) as x:
                self._groups.add_up(x)

    def share(self, x: torch.Tensor) -> None:
        """See Sums."""
        assert x.is_contiguous()
        if x.numel():
            with self._on_host(x) as shared:
                dist.broadcast(shared, group=self._groups.stage, group_src=0)

    def gather(self, part: torch.Tensor, bounds: Sequence[int], whole: torch.Tensor | None) -> None:
        """See Sums. Parts are padded to one size before they are gathered."""
        if not len(part):
            return
        widths = [end - begin for begin, end in pairwise(bounds)]
        padded = torch.nn.functional.pad(part, (0, max(widths) - part.shape[1])).contiguous()
        with self._on_host(padded) as x:
            parts = None if whole is None else [torch.empty_like(x) for _ in widths]
            dist.gather(x, parts, group=self._groups.stage, group_dst=0)
        if whole is not None and parts is not None:
            own = [p[:, :width] for p, width in zip(parts, widths, strict=True)]
            whole.copy_(torch.cat(own, 1))

    def meet(self) -> None:
        """See Sums. On a card only later work waits for the other ranks."""
        self.add_up(torch.zeros(1, device=self._groups.device))

    def check(self) -> None:
        """See Sums. Does nothing: the other methods raise."""

    @contextmanager
    def _on_host(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """`x` where the groups can reach it. Raises RankLost."""
        with lost_ranks():
            if not self._groups.is_staged:
                yield x
                return
            copy = x.to("cpu", copy=True)
            yield copy
            x.copy_(copy)
