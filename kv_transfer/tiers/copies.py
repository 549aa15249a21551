"""Copies between the KV pool and the slots of host memory below it."""

from __future__ import annotations

import ctypes
import mmap
import zlib
from collections.abc import Sequence
from typing import Protocol

from kv_transfer.transports.interface import PoolMemory


class BlockCopies(Protocol):
    """Slots of host memory, of the size of a unit each, beside a pool of such units. A thread of
    the tier calls `save`, `load` and `move`, which return when the copies are complete."""

    @property
    def num_slots(self) -> int:
        """How many units the host memory holds."""

    def slot(self, number: int) -> memoryview:
        """The bytes of a slot."""

    def save(self, units: Sequence[int], slots: Sequence[int]) -> None:
        """Copy units of the pool into slots, pairwise. The pool may change meanwhile."""

    def load(self, slots: Sequence[int], units: Sequence[int]) -> None:
        """Copy slots into units of the pool, pairwise."""

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy units of the pool into other ones, pairwise. The sources may change meanwhile."""


class HostSlots:
    """Slots of one size in host memory. All are resident, so that a lack of memory shows at the
    start."""

    def __init__(self, num_slots: int, size: int) -> None:
        self.num_slots = num_slots
        self._size = size
        populate = getattr(mmap, "MAP_POPULATE", 0)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate
        self._arena = mmap.mmap(-1, num_slots * size, flags=flags)
        self._bytes = memoryview(self._arena)
        self._anchor = ctypes.c_char.from_buffer(self._arena)
        self.address = ctypes.addressof(self._anchor)

    def __getitem__(self, number: int) -> memoryview:
        """The bytes of a slot."""
        return self._bytes[number * self._size : (number + 1) * self._size]


class HostCopies:
    """Slots and a pool that both lie in this process's memory."""

    def __init__(self, pool: PoolMemory, num_slots: int) -> None:
        self._pool = pool
        self._size = pool.block_bytes
        self._slots = HostSlots(num_slots, self._size)

    @property
    def num_slots(self) -> int:
        """See BlockCopies."""
        return self._slots.num_slots

    def slot(self, number: int) -> memoryview:
        """See BlockCopies."""
        return self._slots[number]

    def save(self, units: Sequence[int], slots: Sequence[int]) -> None:
        """See BlockCopies. `memmove` lets other threads run."""
        for unit, slot in zip(units, slots, strict=True):
            ctypes.memmove(self._of_slot(slot), self._of_unit(unit), self._size)

    def load(self, slots: Sequence[int], units: Sequence[int]) -> None:
        """See BlockCopies."""
        for slot, unit in zip(slots, units, strict=True):
            ctypes.memmove(self._of_unit(unit), self._of_slot(slot), self._size)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See BlockCopies."""
        for source, target in zip(sources, targets, strict=True):
            ctypes.memmove(self._of_unit(target), self._of_unit(source), self._size)

    def _of_slot(self, slot: int) -> int:
        return self._slots.address + slot * self._size

    def _of_unit(self, unit: int) -> int:
        return self._pool.address + unit * self._size


def checksum(data: memoryview) -> int:
    """Tells whether memory has changed by accident."""
    return zlib.crc32(data)
