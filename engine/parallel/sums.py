"""Sums over the ranks of a model: through shared memory on one host's CPUs, by NCCL on cards."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
import torch.distributed as dist

LINE_BYTES = 64
"""Of a rank's counter in shared memory; mirrors engine/native/rank_lines.h, as do these."""
DONE, STOPPED = -1, -2
_BUFFER_BYTES = 1 << 20


class RankLost(RuntimeError):
    """A rank has ended, or does not answer: no step of this model can be computed any more."""

    @staticmethod
    def after(answer: int, other: str, limit_s: float) -> RankLost:
        """The error after an answer of our kernels that is not DONE."""
        if answer == STOPPED:
            return RankLost("a rank of this worker has ended")
        return RankLost(f"{other} has not answered for {limit_s:g} s")


class Sums(Protocol):
    """Adds up what the ranks of a model computed."""

    def add_up(self, part: torch.Tensor) -> None:
        """Replace a rank's part, contiguous, by the sum of all ranks' parts. All ranks call it for
        the same sums in the same order. Raises RuntimeError if that is impossible."""

    def meet(self) -> None:
        """Go on when all ranks have come here, and done what they began before. Raises as
        `add_up`."""

    @property
    def waited_ns(self) -> int:
        """The time for which this rank's host has waited for other ranks so far."""


class NoSums:
    """Those of the only rank of a stage."""

    waited_ns = 0

    def add_up(self, part: torch.Tensor) -> None:
        """See Sums; nothing to add."""

    def meet(self) -> None:
        """See Sums; nobody to wait for."""


class CardSums:
    """Sums by torch's process group of the cards (NCCL)."""

    waited_ns = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def add_up(self, part: torch.Tensor) -> None:
        """See Sums."""
        dist.all_reduce(part, group=self._group)

    def meet(self) -> None:
        """See Sums; the host waits for nothing, and the card's later work for all cards."""
        self.add_up(torch.zeros(1, device="cuda"))


class _Call(ctypes.Structure):
    """Mirrors `SumCall` in engine/native/rank_sums.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
        ("memory", ctypes.c_void_p),
        ("buffer_bytes", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("num_ranks", ctypes.c_int64),
        ("round", ctypes.c_int64),
        ("limit_ns", ctypes.c_int64),
        ("waited_ns", ctypes.c_int64),
    )


class HostSums:
    """Sums in fp32, in the order of ranks, through `memory` that all ranks of one host map: equal
    bits on every rank and in every run. `limit_s`: how long a rank waits for another."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        memory: memoryview,
        rank: int,
        num_ranks: int,
        limit_s: float,
    ) -> None:
        """`memory` is zeroed before the first rank begins, and has `bytes_for(num_ranks)`."""
        if memory.nbytes < self.bytes_for(num_ranks):
            raise ValueError(f"{memory.nbytes} bytes are too few for {num_ranks} ranks")
        self._memory = memory  # mapped as long as this lives
        self._function = kernels.baton_rank_sum
        self._limit_s = limit_s
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._call = _Call(
            memory=address,
            buffer_bytes=_BUFFER_BYTES,
            rank=rank,
            num_ranks=num_ranks,
            limit_ns=int(limit_s * 1e9),
        )

    @staticmethod
    def bytes_for(num_ranks: int) -> int:
        """The memory that `num_ranks` share."""
        return (1 + num_ranks) * LINE_BYTES + 2 * num_ranks * _BUFFER_BYTES

    def add_up(self, part: torch.Tensor) -> None:
        """See Sums; raises RankLost."""
        assert part.is_contiguous()
        assert part.dtype in (torch.float32, torch.bfloat16)
        call = self._call
        call.data, call.size = part.data_ptr(), part.numel()
        call.is_bf16 = part.dtype == torch.bfloat16
        answer = self._function(ctypes.byref(call))
        if answer != DONE:
            raise RankLost.after(answer, f"rank {answer}", self._limit_s)

    def meet(self) -> None:
        """See Sums; raises RankLost."""
        self.add_up(torch.zeros(1))

    @property
    def waited_ns(self) -> int:
        """See Sums."""
        return int(self._call.waited_ns)


def stop_sums(kernels: ctypes.CDLL, memory: memoryview) -> None:
    """End all waits of HostSums, or of a StageLink, in this memory, now and from now on: each
    raises RankLost."""
    kernels.baton_stop_ranks(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory))))
