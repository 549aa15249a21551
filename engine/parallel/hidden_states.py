"""Hidden states from one pipeline stage to the next; `StageLink`: through memory of one host.

The first rank of a stage sends, all ranks of the next one receive: after a stage's last sum, all of
its ranks have the same hidden states.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from engine.parallel.sums import DONE, LINE_BYTES, RankLost

SLOT_BYTES = 1 << 18
_STEPS = 2
"""Steps whose hidden states the memory holds, so that a stage need not wait for the next one."""


class StatesLink(Protocol):
    """One end of the link between two stages."""

    def send(self, x: torch.Tensor) -> None:
        """Send hidden states, contiguous. Raises RankLost."""

    def receive(self, x: torch.Tensor) -> None:
        """Receive hidden states of this shape and type into `x`, contiguous. Raises RankLost."""

    @property
    def waited_ns(self) -> int:
        """The time for which this rank's host has waited for the other end so far."""


class _Call(ctypes.Structure):
    """Mirrors `StageCall` in engine/native/rank_stages.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("memory", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("num_receivers", ctypes.c_int64),
        ("receiver", ctypes.c_int64),
        ("round", ctypes.c_int64),
        ("limit_ns", ctypes.c_int64),
        ("waited_ns", ctypes.c_int64),
    )


class StageLink:
    """A `StatesLink`. `limit_s`: how long it waits for the other end."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        memory: memoryview,
        num_receivers: int,
        receiver: int,
        limit_s: float,
    ) -> None:
        """`memory` is zeroed before the first rank begins, and has `bytes_for(...)`. Receivers are
        numbered from 0; the sender's number does not matter."""
        self._memory = memory  # mapped as long as this lives
        self._kernels = kernels
        self._limit_s = limit_s
        lines = (2 + num_receivers) * LINE_BYTES
        self._call = _Call(
            memory=ctypes.addressof(ctypes.c_char.from_buffer(memory)),
            slot_bytes=SLOT_BYTES,
            num_slots=(memory.nbytes - lines) // SLOT_BYTES,
            num_receivers=num_receivers,
            receiver=receiver,
            limit_ns=int(limit_s * 1e9),
        )
        if self._call.num_slots < 1:
            raise ValueError(f"{memory.nbytes} bytes are too few for {num_receivers} receivers")

    @staticmethod
    def bytes_for(num_receivers: int, step_bytes: int) -> int:
        """The memory between two stages, of which the second has `num_receivers` ranks, for steps
        of this many bytes."""
        num_slots = -(-_STEPS * step_bytes // SLOT_BYTES)
        return (2 + num_receivers) * LINE_BYTES + num_slots * SLOT_BYTES

    @property
    def waited_ns(self) -> int:
        """The time for which this end has waited for the other so far."""
        return int(self._call.waited_ns)

    def send(self, x: torch.Tensor) -> None:
        """Send hidden states. Waits while the memory is full. Raises RankLost."""
        self._run(self._kernels.baton_stage_send, x, "the next stage")

    def receive(self, x: torch.Tensor) -> None:
        """Receive hidden states of this shape and type into `x`. Raises RankLost."""
        self._run(self._kernels.baton_stage_receive, x, "the stage before")

    def _run(self, function: ctypes._NamedFuncPointer, x: torch.Tensor, other: str) -> None:
        assert x.is_contiguous()
        call = self._call
        call.data, call.size = x.data_ptr(), x.nbytes
        answer = function(ctypes.byref(call))
        if answer != DONE:
            raise RankLost.after(answer, other, self._limit_s)
