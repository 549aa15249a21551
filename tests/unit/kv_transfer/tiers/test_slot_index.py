"""A tier's index against a plain list of entries, the one used least recently first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.tiers.slot_index import SlotIndex
from tests.effort import times

SLOTS, AGE_S = 4, 10.0
NAMES = [bytes([letter]) for letter in b"abcdef"]


@dataclass
class Entry:
    """A block in a tier, as the model of the index has it."""

    digest: bytes
    slot: int
    used_at: float


class IndexHistory(RuleBasedStateMachine):
    """Random fills, reads, uses and losses of few blocks in few slots."""

    def __init__(self) -> None:
        super().__init__()
        self.index = SlotIndex(SLOTS, AGE_S)
        self.entries: list[Entry] = []
        self.reserved: list[int] = []
        self.readers: list[tuple[int, bytes]] = []
        self.now = 0.0
        self.num_slots = SLOTS
        self.num_evicted = 0

    def used(self) -> set[int]:
        """Slots that are not free."""
        read = {slot for slot, _ in self.readers}
        return {each.slot for each in self.entries} | set(self.reserved) | read

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reserve(self) -> None:
        used = self.used()
        slot = self.index.try_reserve()
        if len(used) < self.num_slots:
            assert slot not in used
        else:
            read = Counter(slot for slot, _ in self.readers)
            victim = next((each for each in self.entries if not read[each.slot]), None)
            assert slot == (victim.slot if victim else None)
            if victim is not None:
                self.entries.remove(victim)
                self.num_evicted += 1
        if slot is not None:
            self.reserved.append(slot)

    @rule(digest=st.sampled_from(NAMES))
    @precondition(lambda self: self.reserved)
    def fill(self, digest: bytes) -> None:
        slot = self.reserved.pop(0)
        self.index.fill(slot, digest, self.now)
        if digest not in [each.digest for each in self.entries]:
            self.entries.append(Entry(digest, slot, self.now))

    @rule()
    @precondition(lambda self: self.reserved)
    def cancel(self) -> None:
        self.index.cancel(self.reserved.pop())

    @rule(chain=st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
    def touch(self, chain: list[bytes]) -> None:
        self.index.touch(chain, self.now)
        for digest in reversed(chain):
            for each in [each for each in self.entries if each.digest == digest]:
                self.entries.remove(each)
                self.entries.append(Entry(digest, each.slot, self.now))

    @rule(data=st.data())
    @precondition(lambda self: self.entries)
    def read(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.entries))
        assert self.index.find(entry.digest) == entry.slot
        self.index.pin(entry.slot)
        self.readers.append((entry.slot, entry.digest))

    @rule()
    @precondition(lambda self: self.readers)
    def end_read(self) -> None:
        self.index.unpin(*self.readers.pop(0))

    @rule(digest=st.sampled_from(NAMES))
    def drop(self, digest: bytes) -> None:
        self.index.drop(digest)
        self.entries = [each for each in self.entries if each.digest != digest]

    @rule()
    def expire(self) -> None:
        old = [each for each in self.entries if self.now - each.used_at >= AGE_S]
        assert self.index.expire(self.now) == [(each.digest, each.slot) for each in old]
        self.entries = [each for each in self.entries if each not in old]
        self.num_evicted += len(old)

    @rule()
    @precondition(lambda self: self.num_slots == SLOTS)
    def retire_free(self) -> None:
        self.index.retire_free()
        self.num_slots = len(self.used())

    @rule(count=st.integers(1, SLOTS + 1))
    def bring_back(self, count: int) -> None:
        expected = min(count, self.index.num_retired)
        back = self.index.bring_back(count)
        assert len(back) == expected
        self.num_slots += expected

    @rule(count=st.integers(0, SLOTS + 1))
    def ask_for_the_coldest(self, count: int) -> None:
        number = max(0, count - (self.num_slots - len(self.used())))
        assert self.index.coldest(count) == [each.digest for each in self.entries][:number]

    @invariant()
    def consistent(self) -> None:
        self.index.check()
        assert self.index.names() == [each.digest for each in self.entries]
        assert len(self.index) == len(self.entries)
        assert (self.index.num_slots, self.index.num_evicted) == (self.num_slots, self.num_evicted)
        for digest in NAMES:
            held = [each.slot for each in self.entries if each.digest == digest]
            assert self.index.find(digest) == (held[0] if held else None)


IndexHistory.TestCase.settings = settings(
    max_examples=times(50, 600), deadline=None, derandomize=True
)
TestIndexHistory = IndexHistory.TestCase


def test_entries_that_are_found_again_keep_their_order_and_their_slots() -> None:
    index = SlotIndex(3, AGE_S)
    index.restore([(2, b"new", 5.0), (0, b"old", 1.0)])
    assert index.names() == [b"old", b"new"]
    assert index.try_reserve() == 1
    assert index.try_reserve() == 0, "the one used least recently gives way"
    index.check()
