"""The index equals what a worker holds, whatever is lost, repeated or late on the way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.events import CacheEvents
from protocol.messages import CacheDump
from router.fleet.cache_index import CacheIndex, PrefixMatch


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


CHAIN = [digest(each) for each in range(8)]


class TruthfulWorker:
    """What a worker does: numbers its events and answers dump requests."""

    def __init__(self, incarnation: str = "i1") -> None:
        self.incarnation = incarnation
        self.seq = 0
        self.hashes: set[bytes] = set()

    def change(self, stored: list[int], removed: list[int]) -> CacheEvents:
        self.seq += 1
        self.hashes -= {digest(each) for each in removed}
        self.hashes |= {digest(each) for each in stored}
        return CacheEvents(
            worker_id="w",
            incarnation=self.incarnation,
            seq=self.seq,
            stored=[digest(each) for each in stored],
            removed=[digest(each) for each in removed],
        )

    def dump(self) -> CacheDump:
        return CacheDump(incarnation=self.incarnation, seq=self.seq, hashes=list(self.hashes))


def synced(worker: TruthfulWorker) -> CacheIndex:
    index = CacheIndex(pending_ttl_s=5.0)
    index.join("w", worker.incarnation)
    assert not index.apply_dump("w", worker.dump())
    return index


def held(index: CacheIndex, *numbers: int, now: float = 0.0) -> int:
    return index.match("w", [digest(each) for each in numbers], now).held


def test_leading_blocks_count_until_the_first_that_is_missing() -> None:
    worker = TruthfulWorker()
    worker.change([0, 1, 3], [])
    index = synced(worker)
    assert held(index, 0, 1, 2, 3) == 2
    assert held(index, 1, 0) == 2
    assert held(index, 2, 0) == 0
    assert index.match("nobody", CHAIN, 0.0) == PrefixMatch(0, 0)


def test_events_before_the_dump_wait_for_it() -> None:
    worker = TruthfulWorker()
    index = CacheIndex(5.0)
    index.join("w", "i1")
    early = worker.change([0], [])
    dump = worker.dump()
    late = worker.change([1], [0])
    assert not index.apply_events(early)
    assert not index.apply_events(late)
    assert not index.is_synced("w")
    assert not index.apply_dump("w", dump)
    assert (held(index, 0), held(index, 1)) == (0, 1)


def test_a_missing_number_asks_for_a_dump_and_trusts_nothing_until_then() -> None:
    worker = TruthfulWorker()
    index = synced(worker)
    index.apply_events(worker.change([0], []))
    worker.change([], [0])
    assert index.apply_events(worker.change([2], []))
    assert index.gaps == 1
    assert held(index, 0) == held(index, 2) == 0
    assert not index.apply_events(worker.change([3], []))
    assert not index.apply_dump("w", worker.dump())
    assert (held(index, 0), held(index, 2, 3)) == (0, 2)


def test_a_hole_behind_the_dump_asks_again() -> None:
    worker = TruthfulWorker()
    index = CacheIndex(5.0)
    index.join("w", "i1")
    dump = worker.dump()
    worker.change([0], [])
    index.apply_events(worker.change([1], []))
    assert index.apply_dump("w", dump)
    assert not index.apply_dump("w", worker.dump())
    assert held(index, 0, 1) == 2


def test_another_incarnation_is_not_listened_to() -> None:
    index = synced(TruthfulWorker())
    other = TruthfulWorker("i2")
    assert not index.apply_events(other.change([0], []))
    assert not index.apply_dump("w", other.dump())
    assert held(index, 0) == 0
    index.join("w", "i2")
    assert not index.apply_dump("w", other.dump())
    assert held(index, 0) == 1


def test_a_routed_prompt_is_expected_until_it_is_stored_removed_or_forgotten() -> None:
    worker = TruthfulWorker()
    worker.change([0], [])
    index = synced(worker)
    index.expect("w", CHAIN[:4], now=10.0)
    assert index.match("w", CHAIN, 11.0) == PrefixMatch(held=1, expected=4)
    index.apply_events(worker.change([1], []))
    assert index.match("w", CHAIN, 11.0) == PrefixMatch(held=2, expected=4)
    index.apply_events(worker.change([], [1]))
    assert index.match("w", CHAIN, 11.0) == PrefixMatch(held=1, expected=1)
    assert index.match("w", CHAIN, 15.0) == PrefixMatch(held=1, expected=1)


def test_expectations_that_expired_leave_no_memory() -> None:
    index = synced(TruthfulWorker())
    for number in range(100):
        index.expect("w", [digest(number)], now=float(number))
    assert len(index._workers["w"].pending) <= 6
    assert len(index._workers["w"].routed) <= 6


def test_a_prompt_that_is_routed_again_is_expected_as_long_again() -> None:
    index = synced(TruthfulWorker())
    index.expect("w", CHAIN[:2], now=0.0)
    index.expect("w", CHAIN[:1], now=4.0)
    index.expect("w", [digest(99)], now=6.0)
    assert index.match("w", CHAIN, 6.0) == PrefixMatch(held=0, expected=1)
    index.expect("w", [digest(98)], now=9.0)
    assert index.match("w", CHAIN, 8.0) == PrefixMatch(held=0, expected=0)


changes = st.lists(
    st.tuples(
        st.lists(st.integers(0, 7), max_size=3),
        st.lists(st.integers(0, 7), max_size=3),
        st.sampled_from(["deliver", "lose", "repeat"]),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(changes)
def test_it_equals_the_worker_whenever_it_claims_to_know(script) -> None:
    """Dumps travel on another connection: an asked one comes at any later time."""
    worker = TruthfulWorker()
    index = CacheIndex(5.0)
    index.join("w", "i1")
    dumps = [worker.dump()]
    last: CacheEvents | None = None
    delivered = 0
    for stored, removed, fate, dump_comes in script:
        events = worker.change(stored, removed)
        if fate != "lose":
            delivered = events.seq
            if index.apply_events(events):
                dumps.append(worker.dump())
            last = events
        if fate == "repeat" and last is not None and index.apply_events(last):
            dumps.append(worker.dump())
        if dump_comes and dumps and index.apply_dump("w", dumps.pop(0)):
            dumps.append(worker.dump())
        if index.is_synced("w") and delivered == worker.seq and not dumps:
            assert index._workers["w"].hashes == worker.hashes

    final = worker.change([0], [])
    if index.apply_events(final):
        dumps.append(worker.dump())
    while dumps:
        if index.apply_dump("w", dumps.pop(0)):
            dumps.append(worker.dump())
    assert index.is_synced("w")
    assert index._workers["w"].hashes == worker.hashes
