"""Copies between the KV pools of a worker's ranks and the slots of host memory below them.

A slot holds a whole block as a single rank would have it, so the contents of a tier do not depend
on the ranks. A worker finds its blocks on disk again even if its model is now split in another way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kv_transfer.head_slices import plan_shares
from kv_transfer.strided_pieces import pieces_of
from kv_transfer.tiers.copies import HostSlots
from kv_transfer.transports.interface import PoolMemory
from protocol.layout import KvLayout


class RankCopies:
    """See `kv_transfer.tiers.copies.BlockCopies`; a unit is a block. The pools of all ranks lie in
    this process's memory, and outlive this object."""

    def __init__(self, pool: PoolMemory, layout: KvLayout, num_slots: int) -> None:
        """`layout` is that of any of the ranks."""
        whole = layout.unsharded
        self._slots = HostSlots(num_slots, whole.block_bytes)
        ranks = [part.address for part in pool.parts]
        slots = self._slots.address
        # the pieces that a rank's blocks and slots share: [blocks or slots, pieces, bytes]
        self._saved = [
            (
                pieces_of(ranks[share.source], pool.num_blocks, share.slices.source),
                pieces_of(slots, num_slots, share.slices.target),
            )
            for share in plan_shares(layout, whole)[0]
        ]
        self._loaded = [
            (
                pieces_of(slots, num_slots, share.slices.source),
                pieces_of(ranks[share.target], pool.num_blocks, share.slices.target),
            )
            for share in plan_shares(whole, layout)[0]
        ]

    @property
    def num_slots(self) -> int:
        """See BlockCopies."""
        return self._slots.num_slots

    def slot(self, number: int) -> memoryview:
        """See BlockCopies."""
        return self._slots[number]

    def save(self, units: Sequence[int], slots: Sequence[int]) -> None:
        """See BlockCopies."""
        _copy(self._saved, units, slots)

    def load(self, slots: Sequence[int], units: Sequence[int]) -> None:
        """See BlockCopies."""
        _copy(self._loaded, slots, units)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See BlockCopies."""
        _copy([(ranks, ranks) for _, ranks in self._loaded], sources, targets)


def _copy(
    pieces: Sequence[tuple[np.ndarray, np.ndarray]], sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Copy blocks pairwise, while other threads run."""
    for source, target in zip(sources, targets, strict=True):
        for ours, theirs in pieces:
            np.copyto(theirs[target], ours[source])
