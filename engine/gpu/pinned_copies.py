"""Copies between a pool on a card and pinned host memory, on a stream of their own.

The card's copy engines move the blocks beside its computing. Only the thread of the tier calls
`save` and `load`; it waits for the copies, and the thread that steps does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kv_pool import KvPool


class PinnedCopies:
    """See `kv_transfer.tiers.copies.BlockCopies`."""

    def __init__(self, pool: KvPool, unit_bytes: int, num_slots: int) -> None:
        # [units or slots, unit_bytes], uint8
        self._pool = pool.tensor.view(-1).view(torch.uint8).view(-1, unit_bytes)
        shape = (num_slots, unit_bytes)
        self._slots = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._bytes = self._slots.numpy()
        self._stream = torch.cuda.Stream(pool.device)

    @property
    def num_slots(self) -> int:
        """See BlockCopies."""
        return self._slots.shape[0]

    def slot(self, number: int) -> memoryview:
        """See BlockCopies."""
        return memoryview(self._bytes[number])

    def save(self, units: Sequence[int], slots: Sequence[int]) -> None:
        """See BlockCopies."""
        with torch.cuda.stream(self._stream):
            for unit, slot in zip(units, slots, strict=True):
                self._slots[slot].copy_(self._pool[unit], non_blocking=True)
        self._stream.synchronize()

    def load(self, slots: Sequence[int], units: Sequence[int]) -> None:
        """See BlockCopies."""
        with torch.cuda.stream(self._stream):
            for slot, unit in zip(slots, units, strict=True):
                self._pool[unit].copy_(self._slots[slot], non_blocking=True)
        self._stream.synchronize()

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See BlockCopies."""
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                self._pool[target].copy_(self._pool[source], non_blocking=True)
        self._stream.synchronize()
