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

    def __init__(self, pool: KvPool, num_slots: int) -> None:
        # [blocks or slots, block_bytes], uint8
        self._pool = pool.tensor.view(pool.num_blocks, -1).view(torch.uint8)
        shape = (num_slots, pool.block_bytes)
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

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """See BlockCopies."""
        with torch.cuda.stream(self._stream):
            for block, slot in zip(blocks, slots, strict=True):
                self._slots[slot].copy_(self._pool[block], non_blocking=True)
        self._stream.synchronize()

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """See BlockCopies."""
        with torch.cuda.stream(self._stream):
            for slot, block in zip(slots, blocks, strict=True):
                self._pool[block].copy_(self._slots[slot], non_blocking=True)
        self._stream.synchronize()
