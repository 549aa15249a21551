"""The first tier: blocks in host memory, copied to and from the pool by a thread of the tier.

Blocks are saved before the pool evicts them, without a pin: a block that was allocated again while
it was copied does not count as saved. Blocks are loaded into blocks of the pool that an admitted
request holds. Each slot has a checksum; a block that fails it is forgotten. All methods belong to
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
from scheduling.block_manager import ColdBlock

log = logging.getLogger(__name__)

BLOCKS_PER_JOB = 8
"""Blocks that are saved in one go: loads wait for no more."""
MAX_SAVING = 64
USUAL_BYTES_PER_S = 4e9


@dataclass
class _Copied:
    """The outcome of a load, which the tier's thread fills in."""

    num_blocks: int = 0
    seconds: float = 0.0
    is_cancelled: bool = False


@dataclass(eq=False)
class Load:
    """Blocks on their way into the pool, the first of which is block `first_block` of its prompt.
    They stay the loader's until `over` is called with the number of leading ones that arrived.
    `parent` is the hash of the block before them, if there is one."""

    first_block: int
    parent: bytes | None
    hashes: Sequence[bytes]
    blocks: Sequence[int]
    over: Callable[[int], None]
    _copied: _Copied = field(default_factory=_Copied)

    def cancel(self) -> None:
        """Load no more of it, if it has not begun. `over` is called all the same."""
        self._copied.is_cancelled = True


class HostTier:
    """Blocks in the slots of `copies`, by hash."""

    def __init__(
        self, copies: BlockCopies, thread: IoThread, block_bytes: int, max_age_s: float
    ) -> None:
        self.index = SlotIndex(copies.num_slots, max_age_s)
        self.counts = TierCounts(block_bytes, USUAL_BYTES_PER_S)
        self.saving: set[bytes] = set()
        self._copies = copies
        self._thread = thread
        self._checksums = [0] * copies.num_slots

    @property
    def num_window(self) -> int:
        """Blocks that may be saved ahead of their eviction. With more than half of the slots they
        would push each other out."""
        return max(1, self.index.num_slots // 2)

    def save(
        self, cold: Sequence[ColdBlock], is_unchanged: Callable[[ColdBlock], bool], now: float
    ) -> bool:
        """Save blocks of the pool that are not here yet, as many as the thread may have to do.
        Returns whether that is all of them."""
        new = [
            each
            for each in cold
            if each.digest not in self.index and each.digest not in self.saving
        ]
        room = max(0, MAX_SAVING - len(self.saving))
        for start in range(0, min(room, len(new)), BLOCKS_PER_JOB):
            self._save(new[start : start + BLOCKS_PER_JOB], is_unchanged, now)
        return len(new) <= room

    def load(self, load: Load, now: float) -> None:
        """Load blocks that are all here."""
        hashes, copied = load.hashes, load._copied
        slots = [self._slot(digest) for digest in hashes]
        for slot in slots:
            self.index.pin(slot)
        self.index.touch(hashes, now)

        def run() -> None:
            if copied.is_cancelled:
                return
            started = time.perf_counter()
            whole = self._num_whole(slots)
            self._copies.load(slots[:whole], load.blocks[:whole])
            copied.seconds = time.perf_counter() - started
            copied.num_blocks = whole

        def over(error: Exception | None) -> None:
            for slot, digest in zip(slots, hashes, strict=True):
                self.index.unpin(slot, digest)
            if not copied.is_cancelled:
                self._note_load(hashes, copied, error)
            load.over(copied.num_blocks)

        self._thread.submit(Job(run, over), is_urgent=True)

    def finish(self) -> None:
        """Take note of copies that are over."""
        self._thread.finish()

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    # -- for the tier below --------------------------------------------------------------------

    def read(self, digest: bytes) -> tuple[int, memoryview]:
        """Pin the slot of an entry, and return it with its bytes. `index.unpin` follows."""
        slot = self._slot(digest)
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
        self, cold: Sequence[ColdBlock], is_unchanged: Callable[[ColdBlock], bool], now: float
    ) -> None:
        saved: list[tuple[ColdBlock, int]] = []
        for each in cold:
            slot = self.index.try_reserve()
            if slot is None:
                break
            saved.append((each, slot))
        if not saved:
            return
        self.saving.update(each.digest for each, _ in saved)
        slots = [slot for _, slot in saved]

        def run() -> None:
            self._copies.save([each.block for each, _ in saved], slots)
            for slot in slots:
                self.seal(slot)

        def over(error: Exception | None) -> None:
            for each, slot in saved:
                self.saving.discard(each.digest)
                if error is None and is_unchanged(each):
                    self.index.fill(slot, each.digest, now)
                    self.counts.num_stored += 1
                else:
                    self.index.cancel(slot)
                    self.counts.num_missed += error is None
            if error is not None:
                self.counts.fail("blocks could not be copied to host memory", error)

        self._thread.submit(Job(run, over), is_urgent=False)

    def _num_whole(self, slots: Sequence[int]) -> int:
        return next((i for i, slot in enumerate(slots) if not self.is_whole(slot)), len(slots))

    def _note_load(self, hashes: Sequence[bytes], copied: _Copied, error: Exception | None) -> None:
        number = copied.num_blocks
        if error is not None:
            for digest in hashes:
                self.index.drop(digest)
            self.counts.fail("blocks could not be copied from host memory", error)
        elif number < len(hashes):
            self.index.drop(hashes[number])
            self.counts.fail("a block in host memory has changed by itself", None)
        self.counts.note_loaded(number, copied.seconds)

    def _slot(self, digest: bytes) -> int:
        slot = self.index.find(digest)
        assert slot is not None, "it was found a moment ago"
        return slot
