"""How blocks of all groups of layers share the slots of a tier: in units of one size.

A unit is the largest piece of which a block of every group is a whole number, so the pool's memory
is a row of units. Each unit of a block is an entry of its own in a tier, by its name. A block of a
layout with one group is one unit, and its hash is the unit's name. Pure.
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


class Units:
    """The units of blocks with these sizes in bytes, by group."""

    def __init__(self, block_bytes: Sequence[int]) -> None:
        self.block_bytes = tuple(block_bytes)
        self.unit_bytes = math.gcd(*block_bytes)
        self.per_block = tuple(size // self.unit_bytes for size in block_bytes)

    @classmethod
    def of(cls, layout: KvLayout) -> Units:
        """The units of blocks of this layout, that of one rank or of a whole worker."""
        groups = range(len(layout.groups))
        return cls([layout.of_group(group).block_bytes for group in groups])

    def names(self, group: int, digest: bytes) -> list[bytes]:
        """The names of a block's units."""
        rest = range(0 if group else 1, self.per_block[group])
        names = [digest + bytes((group, part)) for part in rest]
        return names if group else [digest, *names]

    def of_block(self, group: int, block: int) -> range:
        """The units of a block of the pool."""
        number = self.per_block[group]
        return range(block * number, (block + 1) * number)

    def cold(self, group: int, block: ColdBlock) -> list[ColdUnit]:
        """The units of an unpinned cached block."""
        pairs = zip(self.of_block(group, block.block), self.names(group, block.digest), strict=True)
        return [ColdUnit(unit, name, group, block) for unit, name in pairs]
