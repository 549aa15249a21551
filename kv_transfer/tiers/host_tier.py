"""The first tier: units of blocks in host memory, copied to and from the pool by a thread of the
tier (`kv_transfer.tiers.units`).

Blocks are saved before the pool evicts them, without a pin: a block that was allocated again while
it was copied does not count as saved. Blocks are loaded into blocks of the pool that an admitted
request holds. Each slot has a checksum; a unit that fails it is forgotten. All methods belong to
the thread that steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_transfer.tiers.copies import BlockCopies, checksum
from kv_transfer.tiers.io_thread import IoThread, Job
from kv_transfer.tiers.slot_index import SlotIndex
from kv_transfer.tiers.tier_counts import TierCounts
from kv_transfer.tiers.units import ColdUnit

log = logging.getLogger(__name__)

UNITS_PER_JOB = 8
"""The most units that are saved in one job, because a load may have to wait for one job."""
MAX_SAVING = 64
USUAL_BYTES_PER_S = 4e9


@dataclass
class _Copied:
    """The outcome of a load, which the tier's thread fills in."""

    num_units: int = 0
    seconds: float = 0.0
    is_whole: bool = False
    is_cancelled: bool = False


@dataclass(eq=False)
class Load:
    """Units on their way into the pool: the units with these `names` go into `units`, and the
    sources of `moves`, which lie in the pool, into its targets. The caller keeps the targets
    reserved until `over` is called with the number of leading units that were loaded."""

    names: Sequence[bytes]
    units: Sequence[int]
    over: Callable[[int], None]
    moves: tuple[Sequence[int], Sequence[int]] = ((), ())
    _copied: _Copied = field(default_factory=_Copied)

    @property
    def is_whole(self) -> bool:
        """Whether all units were copied."""
        return self._copied.is_whole

    def cancel(self) -> None:
        """Cancel the copies that have not begun. `over` is called in any case."""
        self._copied.is_cancelled = True


class HostTier:
    """Units in the slots of `copies`, by name."""

    def __init__(
        self, copies: BlockCopies, thread: IoThread, unit_bytes: int, max_age_s: float
    ) -> None:
        self.index = SlotIndex(copies.num_slots, max_age_s)
        self.counts = TierCounts(unit_bytes, USUAL_BYTES_PER_S)
        self.saving: set[bytes] = set()
        self._copies = copies
        self._thread = thread
        self._checksums = [0] * copies.num_slots

    @property
    def num_window(self) -> int:
        """How many units may be saved ahead of their eviction: half of the slots, because more
        would evict each other."""
        return max(1, self.index.num_slots // 2)

    def has(self, name: bytes) -> bool:
        """Whether a unit is in this tier, or being saved there."""
        return name in self.index or name in self.saving

    def save(
        self, cold: Sequence[ColdUnit], is_unchanged: Callable[[ColdUnit], bool], now: float
    ) -> bool:
        """Save units of the pool that this tier does not have yet, as many as may be queued at a
        time. Returns whether that is all of them."""
        new = [each for each in cold if not self.has(each.name)]
        room = max(0, MAX_SAVING - len(self.saving))
        for start in range(0, min(room, len(new)), UNITS_PER_JOB):
            self._save(new[start : start + UNITS_PER_JOB], is_unchanged, now)
        return len(new) <= room

    def load(self, load: Load, now: float) -> None:
        """Load units. All their names must be in this tier."""
        names, copied = load.names, load._copied
        slots = [self._slot(name) for name in names]
        for slot in slots:
            self.index.pin(slot)
        self.index.touch(names, now)

        def run() -> None:
            if copied.is_cancelled:
                return
            started = time.perf_counter()
            whole = self._num_whole(slots)
            self._copies.load(slots[:whole], load.units[:whole])
            copied.seconds = time.perf_counter() - started
            copied.num_units = whole
            if whole == len(slots):
                self._copies.move(*load.moves)
                copied.is_whole = True

        def over(error: Exception | None) -> None:
            for slot, name in zip(slots, names, strict=True):
                self.index.unpin(slot, name)
            if not copied.is_cancelled:
                self._note_load(names, copied, error)
            load.over(copied.num_units)

        self._thread.submit(Job(run, over), is_urgent=True)

    def finish(self) -> None:
        """Take note of copies that are over."""
        self._thread.finish()

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    # -- for the tier below --------------------------------------------------------------------

    def read(self, name: bytes) -> tuple[int, memoryview]:
        """Pin the slot of an entry, and return it with its bytes. `index.unpin` follows."""
        slot = self._slot(name)
        self.index.pin(slot)
        return slot, self._copies.slot(slot)

    def is_whole(self, slot: int) -> bool:
        """Whether a slot holds what was written to it. Any thread may call this for a slot that is
        reserved or pinned."""
        return checksum(self._copies.slot(slot)) == self._checksums[slot]

    def seal(self, slot: int) -> None:
        """Note the checksum of a slot that was filled; called by the thread that filled it."""
        self._checksums[slot] = checksum(self._copies.slot(slot))

    def slot(self, slot: int) -> memoryview:
        """The bytes of a reserved slot."""
        return self._copies.slot(slot)

    # -- steps ---------------------------------------------------------------------------------

    def _save(
        self, cold: Sequence[ColdUnit], is_unchanged: Callable[[ColdUnit], bool], now: float
    ) -> None:
        saved: list[tuple[ColdUnit, int]] = []
        for each in cold:
            slot = self.index.try_reserve()
            if slot is None:
                break
            saved.append((each, slot))
        if not saved:
            return
        self.saving.update(each.name for each, _ in saved)
        slots = [slot for _, slot in saved]

        def run() -> None:
            self._copies.save([each.unit for each, _ in saved], slots)
            for slot in slots:
                self.seal(slot)

        def over(error: Exception | None) -> None:
            for each, slot in saved:
                self.saving.discard(each.name)
                if error is None and is_unchanged(each):
                    self.index.fill(slot, each.name, now)
                    self.counts.num_stored += 1
                else:
                    self.index.cancel(slot)
                    self.counts.num_missed += error is None
            if error is not None:
                self.counts.fail("blocks could not be copied to host memory", error)

        self._thread.submit(Job(run, over), is_urgent=False)

    def _num_whole(self, slots: Sequence[int]) -> int:
        return next((i for i, slot in enumerate(slots) if not self.is_whole(slot)), len(slots))

    def _note_load(self, names: Sequence[bytes], copied: _Copied, error: Exception | None) -> None:
        number = copied.num_units
        if error is not None:
            for name in names:
                self.index.drop(name)
            self.counts.fail("blocks could not be copied from host memory", error)
        elif number < len(names):
            self.index.drop(names[number])
            self.counts.fail("a block in host memory has changed by itself", None)
        self.counts.note_loaded(number, copied.seconds)

    def _slot(self, name: bytes) -> int:
        slot = self.index.find(name)
        assert slot is not None, "it was found a moment ago"
        return slot
