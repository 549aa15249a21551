"""The second tier: encrypted units of blocks in a file, below host memory.

The coldest units of host memory are written behind, and read back into host memory for requests
that will need them. A unit that cannot be read, or was not written by us, is forgotten and
computed again. All methods belong to the thread that steps; the tier's thread reads and writes.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence

from kv_transfer.tiers.block_file import BlockFile
from kv_transfer.tiers.disk_key import ForgedBlock
from kv_transfer.tiers.host_tier import HostTier
from kv_transfer.tiers.io_thread import IoThread, Job
from kv_transfer.tiers.slot_index import SlotIndex
from kv_transfer.tiers.tier_counts import TierCounts

log = logging.getLogger(__name__)

MAX_WRITING = 16
RETRY_S = 60.0
"""The time after which a tier on a full disk tries to grow again, by one unit."""
USUAL_BYTES_PER_S = 1e9
NoteRead = Callable[[bytes, float], None]
"""Called with the name of a unit that has arrived in host memory, and the seconds it took."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskTier:
    """Units in the slots of `file`, by name."""

    def __init__(
        self, file: BlockFile, host: HostTier, thread: IoThread, unit_bytes: int, max_age_s: float
    ) -> None:
        self.index = SlotIndex(file.num_slots, max_age_s)
        self.counts = TierCounts(unit_bytes, USUAL_BYTES_PER_S)
        self.reading: set[bytes] = set()
        self._writing: set[bytes] = set()
        self._file = file
        self._host = host
        self._thread = thread
        self._now = 0.0
        self._retry_at = 0.0
        self._tried: int | None = None
        """The slot by which a tier on a full disk tries to grow."""

    def restore(self, now: float, wall_s: float) -> int:
        """Find the units again that an earlier process wrote. Returns their number."""
        entries = [
            (each.slot, each.name, now - max(0.0, wall_s - each.written_s))
            for each in self._file.found()
        ]
        self.index.restore(entries)
        self.expire(now)
        return len(self.index)

    def save_coldest(self, count: int, now: float) -> bool:
        """Write the units that host memory would give up for `count` more, unless they are on disk
        already. Submits as many as may be queued at a time. Returns whether that is all of them."""
        self._now = now
        if len(self._writing) >= MAX_WRITING:
            return False
        if self.index.num_retired and now >= self._retry_at:
            self._retry_at = now + RETRY_S
            (self._tried,) = self.index.bring_back(1)
        for name in self._host.index.coldest(count):
            if name not in self.index and name not in self._writing:
                if len(self._writing) >= MAX_WRITING:
                    return False
                self._save(name)
        return True

    def raise_units(self, names: Sequence[bytes], note: NoteRead, now: float) -> int:
        """Read units from disk into host memory, unless they are there already. Stops at the first
        unit that is in neither, or for which host memory has no room. `note` is called for each
        unit that has arrived. Returns how many reads were begun."""
        self._now = now
        number = 0
        self.index.touch(names, now)
        for name in names:
            if name in self._host.index or name in self.reading:
                continue
            if name not in self.index or len(self.reading) >= self._host.num_window:
                break
            slot = self._host.index.try_reserve()
            if slot is None:
                break
            self._raise(name, slot, note)
            number += 1
        return number

    def drop(self, name: bytes) -> None:
        """Forget a unit, and make it unreadable."""
        slot = self.index.find(name)
        if slot is not None:
            self.index.drop(name)
            self._erase(slot)

    def expire(self, now: float) -> None:
        """Forget the units that were not used for too long, and make them unreadable."""
        for _, slot in self.index.expire(now):
            self._erase(slot)

    def finish(self) -> None:
        """Take note of reads and writes that are over."""
        self._thread.finish()

    def close(self) -> None:
        """End the thread and close the file."""
        self._thread.close()
        self._file.close()

    # -- steps ---------------------------------------------------------------------------------

    def _save(self, name: bytes) -> None:
        slot = self.index.try_reserve()
        if slot is None:
            return
        self._writing.add(name)
        host_slot, unit = self._host.read(name)

        def run() -> None:
            if not self._host.is_whole(host_slot):
                raise ForgedBlock("a block in host memory has changed by itself")
            self._file.write(slot, name, unit)

        def over(error: Exception | None) -> None:
            self._writing.discard(name)
            is_kept = self._host.index.find(name) == host_slot
            self._host.index.unpin(host_slot, name)
            if error is None and is_kept:
                self.index.fill(slot, name, self._now)
                self.counts.num_stored += 1
                if slot == self._tried:
                    self._grow_again()
                return
            self.index.cancel(slot)
            if error is None:
                self._erase(slot)  # or a later process would find a unit that is no longer valid
            else:
                self._note_failed_write(error)

        self._thread.submit(Job(run, over), is_urgent=False)

    def _raise(self, name: bytes, host_slot: int, note: NoteRead) -> None:
        slot = self.index.find(name)
        assert slot is not None, "it was found a moment ago"
        self.reading.add(name)
        self.index.pin(slot)
        target = self._host.slot(host_slot)
        took: list[float] = []

        def run() -> None:
            started = time.perf_counter()
            self._file.read(slot, name, target)
            self._host.seal(host_slot)
            took.append(time.perf_counter() - started)

        def over(error: Exception | None) -> None:
            self.reading.discard(name)
            is_kept = self.index.find(name) == slot
            self.index.unpin(slot, name)
            if error is None and is_kept:
                self._host.index.fill(host_slot, name, self._now)
                self.counts.note_loaded(1, took[0])
                note(name, took[0])
                return
            self._host.index.cancel(host_slot)
            if error is not None:
                self.drop(name)
                self.counts.fail("blocks on disk could not be read", error)

        self._thread.submit(Job(run, over), is_urgent=True)

    def _erase(self, slot: int) -> None:
        """Erase a slot. Later writes to the slot are queued after this."""

        def over(error: Exception | None) -> None:
            if error is not None:
                self.counts.fail("blocks on disk could not be erased", error)

        self._thread.submit(Job(lambda: self._file.erase(slot), over), is_urgent=False)

    def _grow_again(self) -> None:
        self._tried = None
        self.index.bring_back(self.index.num_retired)
        log.info("the disk has room again, so its tier grows on")

    def _note_failed_write(self, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            self.index.retire_free()
            self._retry_at = self._now + RETRY_S
            self.counts.fail("the disk is full, so its tier does not grow for now", error)
        else:
            self.counts.fail("blocks could not be written to disk", error)
