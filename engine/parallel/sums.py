"""Sums over the ranks of a model through shared memory, on one host's CPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

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


class NoSums:
    """The sums of a stage's only rank: nothing is added."""

    rank = 0
    address: int | None = None
    waited_ns = 0

    def add_up(self, part: torch.Tensor) -> None:
        """See Sums; nothing to add."""

    def share(self, x: torch.Tensor) -> None:
        """See Sums; there is nobody else."""

    def gather(self, part: torch.Tensor, bounds: Sequence[int], whole: torch.Tensor | None) -> None:
        """See Sums; the only part is the whole."""
        assert whole is not None
        whole.copy_(part)

    def meet(self) -> None:
        """See Sums; nobody to wait for."""

    def check(self) -> None:
        """See Sums; nothing can fail."""


class _Ranks(ctypes.Structure):
    """Mirrors `RankSums` in engine/native/rank_sums.h."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("buffer_bytes", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("num_ranks", ctypes.c_int64),
        ("round", ctypes.c_int64),
        ("limit_ns", ctypes.c_int64),
        ("waited_ns", ctypes.c_int64),
        ("answer", ctypes.c_int64),
    )


class HostSums:
    """Sums in fp32, in the order of ranks, through `memory` that all ranks of one host map: equal
    bits on every rank and in every run. `limit_s`: how long a rank waits for another. Methods raise
    RankLost; after it, all do."""

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
        self._kernels = kernels
        self._limit_s = limit_s
        self.rank = rank
        self._ranks = _Ranks(
            memory=ctypes.addressof(ctypes.c_char.from_buffer(memory)),
            buffer_bytes=_BUFFER_BYTES,
            rank=rank,
            num_ranks=num_ranks,
            limit_ns=int(limit_s * 1e9),
            answer=DONE,
        )
        self.address: int | None = ctypes.addressof(self._ranks)

    @staticmethod
    def bytes_for(num_ranks: int) -> int:
        """The memory that `num_ranks` share."""
        return (1 + num_ranks) * LINE_BYTES + 2 * num_ranks * _BUFFER_BYTES

    def add_up(self, part: torch.Tensor) -> None:
        """See Sums."""
        assert part.is_contiguous()
        assert part.dtype in (torch.float32, torch.bfloat16)
        is_bf16 = part.dtype == torch.bfloat16
        self._kernels.baton_rank_sum(self.address, part.data_ptr(), part.numel(), is_bf16)
        self.check()

    def share(self, x: torch.Tensor) -> None:
        """See Sums."""
        assert x.is_contiguous()
        self._kernels.baton_rank_share(self.address, x.data_ptr(), x.nbytes)
        self.check()

    def gather(self, part: torch.Tensor, bounds: Sequence[int], whole: torch.Tensor | None) -> None:
        """See Sums."""
        assert part.is_contiguous()
        assert whole is None or whole.is_contiguous()
        assert (whole is None) == (self.rank > 0)
        at = (ctypes.c_int64 * len(bounds))(*(part.itemsize * each for each in bounds))
        to = None if whole is None else whole.data_ptr()
        self._kernels.baton_rank_gather(self.address, part.data_ptr(), at, len(part), to)
        self.check()

    def meet(self) -> None:
        """See Sums."""
        self.add_up(torch.zeros(1))

    def check(self) -> None:
        """See Sums."""
        answer = self._ranks.answer
        if answer != DONE:
            raise RankLost.after(answer, f"rank {answer}", self._limit_s)

    @property
    def waited_ns(self) -> int:
        """See Sums."""
        return int(self._ranks.waited_ns)


def stop_sums(kernels: ctypes.CDLL, memory: memoryview) -> None:
    """End all waits of HostSums, or of a StageLink, in this memory, now and from now on: each
    raises RankLost."""
    kernels.baton_stop_ranks(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory))))
