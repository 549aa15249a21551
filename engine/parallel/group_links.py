"""Hidden states from a stage to the next by torch's process groups.

Each rank sends to the rank with the same number in the next stage: after a stage's last sum, all of
its ranks have the same hidden states. On cards, sending and receiving are queued on the stream.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from engine.checkpoint.shard import Shard
from engine.parallel.process_groups import RankGroups, lost_ranks


class GroupLink:
    """One end of the link between this rank and the rank with the same number in `stage`, the next
    or the previous stage."""

    waited_ns = 0

    def __init__(self, groups: RankGroups, stage: int) -> None:
        own = groups.shard
        self._other = Shard(own.rank, own.size, stage, own.num_stages).number
        self._groups = groups
        self._sent: tuple[dist.Work, torch.Tensor] | None = None

    def send(self, x: torch.Tensor) -> None:
        """Send hidden states. They are sent while this rank computes its next step; the step after
        that waits until they are sent. Raises RankLost."""
        assert x.is_contiguous()
        with lost_ranks():
            if self._sent is not None:
                self._sent[0].wait()
            x = x.to("cpu", copy=True) if self._groups.is_staged else x
            work = dist.isend(x, dst=self._other)
            self._sent = None if work is None else (work, x)  # which stays alive until it has left

    def receive(self, x: torch.Tensor) -> None:
        """Receive hidden states of this shape and type into `x`. Raises RankLost."""
        assert x.is_contiguous()
        with lost_ranks():
            received = torch.empty_like(x, device="cpu") if self._groups.is_staged else x
            dist.recv(received, src=self._other)
            if self._groups.is_staged:
                x.copy_(received)
