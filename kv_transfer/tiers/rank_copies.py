"""Copies between the KV pools of a worker's ranks and the slots of host memory below them.

A slot holds a unit of a block as one rank would have it, so what a tier keeps does not depend on
the ranks: a worker finds on its disk what it left there, also if its model is now split in another
way. A block is put together in a buffer before its units go to slots, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from kv_transfer.head_slices import plan_shares
from kv_transfer.strided_pieces import pieces_of
from kv_transfer.tiers.copies import HostSlots
from kv_transfer.tiers.units import Units
from kv_transfer.transports.interface import PoolMemory
from protocol.layout import KvLayout

Block = tuple[int, int]
"""The group and the number of a block."""


class RankCopies:
    """See `kv_transfer.tiers.copies.BlockCopies`. `units` are those of the whole cache, and their
    numbers tell groups apart. The pools of all ranks lie in this process's memory, and outlive
    this."""

    def __init__(self, pool: PoolMemory, layout: KvLayout, units: Units, num_slots: int) -> None:
        """`layout` is that of any of the ranks."""
        self._units = units
        self._slots = HostSlots(num_slots, units.unit_bytes)
        self._groups = [_RankBlocks(each, layout, group) for group, each in enumerate(pool.groups)]

    @property
    def num_slots(self) -> int:
        """See BlockCopies."""
        return self._slots.num_slots

    def slot(self, number: int) -> memoryview:
        """See BlockCopies."""
        return self._slots[number]

    def save(self, units: Sequence[int], slots: Sequence[int]) -> None:
        """See BlockCopies."""
        for (group, block), pairs in self._by_block(units, slots):
            buffer = self._groups[group].gather(block)
            for part, slot in pairs:
                np.copyto(self._bytes(slot), self._part(buffer, part))

    def load(self, slots: Sequence[int], units: Sequence[int]) -> None:
        """See BlockCopies."""
        for (group, block), pairs in self._by_block(units, slots):
            blocks = self._groups[group]
            is_whole = len(pairs) == self._units.per_block[group]
            buffer = blocks.buffer if is_whole else blocks.gather(block)
            for part, slot in pairs:
                np.copyto(self._part(buffer, part), self._bytes(slot))
            blocks.scatter(block)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See BlockCopies. All units of a block move together."""
        for (group, block), pairs in self._by_block(targets, sources):
            _, source, _ = self._units.place(pairs[0][1])
            self._groups[group].gather(source)
            self._groups[group].scatter(block)

    def _by_block(
        self, units: Sequence[int], others: Sequence[int]
    ) -> Iterator[tuple[Block, list[tuple[int, int]]]]:
        """Neighbouring units of one block: the block, and pairs of a unit's part of it with what
        goes with the unit."""
        pairs = zip(units, others, strict=True)
        found = [(*self._units.place(unit), other) for unit, other in pairs]
        for block, some in groupby(found, key=lambda each: each[:2]):
            yield block, [(part, other) for _, _, part, other in some]

    def _part(self, buffer: np.ndarray, part: int) -> np.ndarray:
        size = self._units.unit_bytes
        return buffer[part * size : (part + 1) * size]

    def _bytes(self, slot: int) -> np.ndarray:
        return np.frombuffer(self._slots[slot], np.uint8)


class _RankBlocks:
    """The blocks of one group in the pools of all ranks, and a buffer for a whole one."""

    def __init__(self, pool: PoolMemory, layout: KvLayout, group: int) -> None:
        whole = layout.unsharded
        self.buffer = np.zeros(whole.block_stride(group), np.uint8)
        ranks, place = [part.address for part in pool.parts], self.buffer.ctypes.data
        # the pieces that the ranks' blocks [blocks, pieces, bytes] and the buffer share
        self._gathered = [
            (
                pieces_of(ranks[share.source], pool.num_blocks, share.slices.source),
                pieces_of(place, 1, share.slices.target)[0],
            )
            for share in plan_shares(layout, whole)[group]
        ]
        self._scattered = [
            (
                pieces_of(place, 1, share.slices.source)[0],
                pieces_of(ranks[share.target], pool.num_blocks, share.slices.target),
            )
            for share in plan_shares(whole, layout)[group]
        ]

    def gather(self, block: int) -> np.ndarray:
        """Fill the buffer with a block. Other threads run meanwhile."""
        for ours, buffer in self._gathered:
            np.copyto(buffer, ours[block])
        return self.buffer

    def scatter(self, block: int) -> None:
        """Let all ranks have the buffer as this block."""
        for buffer, ours in self._scattered:
            np.copyto(ours[block], buffer)
