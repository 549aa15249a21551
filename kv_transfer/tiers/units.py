"""How blocks of all groups of layers share the slots of a tier: in units of one size.

A unit is the largest size that divides the distance between two blocks of every group, so the
pool's memory is a row of units. Blocks with tokens follow each other closely. A state lies at the
start of its large page, and takes as many units as hold it. Each unit of a block is an entry of its
own in a tier, under its own name. A block of a layout with one group is one unit, and its hash is
the unit's name. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from protocol.layout import KvLayout
from scheduling.block_manager import ColdBlock


class ColdUnit(NamedTuple):
    """A unit of an unpinned cached block of a group."""

    unit: int
    name: bytes
    group: int
    block: ColdBlock


_PART_BYTES = 2
SUFFIX_BYTES = 1 + _PART_BYTES
"""The most bytes that a unit's name has after its block's hash: the numbers of the group and
part."""


class Units:
    """The units of blocks with these sizes in bytes, by group. Two blocks of a group begin
    `strides` bytes apart; the default is their size. With the `pool_bytes` of the memory, the
    number of a unit tells its group, too; without them, it is the unit's place in the memory."""

    def __init__(
        self,
        block_bytes: Sequence[int],
        strides: Sequence[int] | None = None,
        pool_bytes: int = 0,
    ) -> None:
        strides = strides or block_bytes
        self.block_bytes = tuple(block_bytes)
        self.unit_bytes = math.gcd(*strides)
        self.per_block = tuple(-(-size // self.unit_bytes) for size in block_bytes)
        self._strides = tuple(stride // self.unit_bytes for stride in strides)
        self._units_of_group = pool_bytes // self.unit_bytes

    @classmethod
    def of(cls, layout: KvLayout, pool_bytes: int = 0) -> Units:
        """The units of blocks of this layout, which is that of one rank or of a whole worker."""
        sizes = [layout.of_group(group).block_bytes for group in range(len(layout.groups))]
        strides = [
            size if group.state_numbers is None else layout.page_bytes
            for group, size in zip(layout.groups, sizes, strict=True)
        ]
        return cls(sizes, strides, pool_bytes)

    def names(self, group: int, digest: bytes) -> list[bytes]:
        """The names of a block's units."""
        rest = range(0 if group else 1, self.per_block[group])
        names = [digest + bytes((group,)) + part.to_bytes(_PART_BYTES) for part in rest]
        return names if group else [digest, *names]

    def of_block(self, group: int, block: int) -> range:
        """The units of a block of the pool."""
        first = group * self._units_of_group + block * self._strides[group]
        return range(first, first + self.per_block[group])

    def place(self, unit: int) -> tuple[int, int, int]:
        """The group and block of a unit whose number tells its group, and its part of the block."""
        group, number = divmod(unit, self._units_of_group)
        block, part = divmod(number, self._strides[group])
        return group, block, part

    def cold(self, group: int, block: ColdBlock) -> list[ColdUnit]:
        """The units of an unpinned cached block."""
        pairs = zip(self.of_block(group, block.block), self.names(group, block.digest), strict=True)
        return [ColdUnit(unit, name, group, block) for unit, name in pairs]
