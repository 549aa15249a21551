"""Which slot of a tier holds which unit of a block, and which slot is given up next.

Pure bookkeeping over slot numbers and the names of units; the time is passed in. A slot is free,
reserved (it is being filled), or holds a unit, whose name is an entry of the index. Pinned slots,
which are being read, are neither given up nor reused. An entry leaves the index when it is dropped,
when it was not used for `max_age_s`, or when the tier is full and it is the least recently used.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from kv_transfer.tiers.tier_news import TierNews


class SlotIndex:
    """Owner of the slot numbers `0 .. num_slots - 1`."""

    def __init__(self, num_slots: int, max_age_s: float) -> None:
        self._num_slots = num_slots
        self._max_age_s = max_age_s
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._used_at: dict[bytes, float] = {}
        self._retired: list[int] = []
        self._reserved: set[int] = set()
        self._pins: Counter[int] = Counter()
        self.news = TierNews()
        """Changes of the entries."""
        self.num_evicted = 0
        """Entries so far that left because of their age or because the tier was full."""

    def __len__(self) -> int:
        """The number of entries."""
        return len(self._slot_of)

    def __contains__(self, name: bytes) -> bool:
        return name in self._slot_of

    def report_by(self, news: TierNews) -> None:
        """Report all changes to `news` from now on, and the present entries at once."""
        self.news = news
        for name in self._slot_of:
            news.store(name)

    @property
    def num_slots(self) -> int:
        """The number of slots, used or not."""
        return self._num_slots

    def find(self, name: bytes) -> int | None:
        """The slot that holds a unit; None if there is none."""
        return self._slot_of.get(name)

    def names(self) -> list[bytes]:
        """The names of all entries, least recently used first."""
        return list(self._slot_of)

    def coldest(self, count: int) -> list[bytes]:
        """The names of entries that are given up if `count` more units come."""
        number = count - len(self._free)
        return [name for name, _ in zip(self._slot_of, range(number), strict=False)]

    def try_reserve(self) -> int | None:
        """A slot to fill. If no slot is free, evicts the least recently used entry. None if every
        slot is reserved or pinned."""
        if not self._free:
            victim = next((d for d, slot in self._slot_of.items() if not self._pins[slot]), None)
            if victim is None:
                return None
            self._evict(victim)
        slot = self._free.pop()
        self._reserved.add(slot)
        return slot

    def restore(self, entries: Sequence[tuple[int, bytes, float]]) -> None:
        """Take over entries (slot, name, last use) that outlived the former index. This one must be
        unused."""
        assert not self._slot_of
        assert not self._reserved
        for slot, name, used_at in sorted(entries, key=lambda entry: entry[2]):
            self._slot_of[name] = slot
            self._used_at[name] = used_at
            self.news.store(name)
        held = set(self._slot_of.values())
        self._free = [slot for slot in self._free if slot not in held]

    def fill(self, slot: int, name: bytes, now: float) -> None:
        """Note that a reserved slot holds this unit now. If another slot already holds it, this
        slot becomes free."""
        self._reserved.remove(slot)
        if name in self._slot_of:
            self._free.append(slot)
            return
        self._slot_of[name] = slot
        self._used_at[name] = now
        self.news.store(name)

    def cancel(self, slot: int) -> None:
        """Note that a reserved slot was not filled."""
        self._reserved.remove(slot)
        self._free.append(slot)

    def retire_free(self) -> None:
        """Stop using the free slots, because the file could not grow to hold them."""
        self._num_slots -= len(self._free)
        self._retired += self._free
        self._free.clear()

    @property
    def num_retired(self) -> int:
        """The number of slots that are not used at present."""
        return len(self._retired)

    def bring_back(self, count: int) -> list[int]:
        """Use at most `count` retired slots again; `try_reserve` gives the last of them next.
        Returns them."""
        first = max(0, len(self._retired) - count)
        back, self._retired = self._retired[first:], self._retired[:first]
        self._free += back
        self._num_slots += len(back)
        return back

    def touch(self, names: Sequence[bytes], now: float) -> None:
        """Note that these entries, in chain order, are used now. The tail is given up before the
        head."""
        for name in reversed(names):
            if name in self._slot_of:
                self._slot_of.move_to_end(name)
                self._used_at[name] = now

    def pin(self, slot: int) -> None:
        """Note that the slot of an entry is being read."""
        self._pins[slot] += 1

    def unpin(self, slot: int, name: bytes) -> None:
        """Note that one reader of this entry's slot has finished. If the entry was dropped
        meanwhile, the slot becomes free after its last reader."""
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if self._slot_of.get(name) != slot:
                self._free.append(slot)

    def drop(self, name: bytes) -> None:
        """Forget an entry, if there is one."""
        slot = self._slot_of.pop(name, None)
        if slot is None:
            return
        del self._used_at[name]
        self.news.remove(name)
        if not self._pins[slot]:
            self._free.append(slot)

    def expire(self, now: float) -> list[tuple[bytes, int]]:
        """Forget the entries that were not used for too long. Returns their names and slots."""
        expired = []
        for name, slot in self._slot_of.items():
            if now - self._used_at[name] < self._max_age_s:
                break
            expired.append((name, slot))
        for name, _ in expired:
            self._evict(name)
        return expired

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds; for tests."""
        held = set(self._slot_of.values())
        doomed = set(self._pins) - held
        parts = (set(self._free), held, self._reserved, doomed, set(self._retired))
        assert len(self._free) == len(set(self._free)), "a slot is free twice"
        assert sum(map(len, parts)) == len(set().union(*parts))
        assert sum(map(len, parts)) == self._num_slots + self.num_retired
        assert self._used_at.keys() == self._slot_of.keys()

    def _evict(self, name: bytes) -> None:
        self.num_evicted += 1
        self.drop(name)
