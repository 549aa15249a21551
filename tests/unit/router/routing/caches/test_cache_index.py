"""The index equals what a worker holds, whatever is lost, repeated or late on the way."""

from __future__ import annotations

import msgspec
import pytest

from protocol.errors import ProtocolError
from protocol.events import CacheEvents
from protocol.messages import CacheDump
from router.routing.caches import block_lists
from router.routing.caches.block_holders import EXACT_BLOCKS, STRIDE
from router.routing.caches.cache_index import CacheIndex, PrefixMatch
from tests.unit.router.routing.caches.truthful_worker import (
    CHAIN,
    TruthfulWorker,
    digest,
    held,
    piece_for,
    synced,
)


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


def test_a_dump_in_pieces_counts_once_it_is_whole() -> None:
    worker = TruthfulWorker()
    worker.change([0, 1, 2, 3, 4], [])
    index = CacheIndex(5.0)
    index.join("w", "i1")
    asked = index.new_dump("w")
    for first in (0, 2, 4):
        assert (asked.first, index.is_synced("w"), index.num_blocks("w")) == (first, False, 0)
        piece = piece_for(asked, worker)
        asked = index.take_piece("w", piece)
    assert (asked, index.is_synced("w"), held(index, 0, 1, 2, 3, 4)) == (None, True, 5)
    assert index.take_piece("w", piece) is None, "it came before"


def test_a_piece_that_answers_an_earlier_request_counts_for_nothing() -> None:
    worker = TruthfulWorker()
    worker.change([0, 1, 2], [])
    index = CacheIndex(5.0)
    index.join("w", "i1")
    early, late = index.new_dump("w"), index.new_dump("w")
    assert index.take_piece("w", piece_for(early, worker)) is None
    begun = index.take_piece("w", piece_for(late, worker))
    assert begun.first == 2
    again = index.next_piece("w")
    assert (again.first, index.take_piece("w", piece_for(begun, worker))) == (2, None)
    second = index.new_dump("w")
    assert (second.first, index.take_piece("w", piece_for(again, worker))) == (0, None)
    assert not index.is_synced("w")


def test_a_worker_that_lost_the_list_begins_a_new_one() -> None:
    worker = TruthfulWorker()
    worker.change([0, 1, 2], [])
    index = CacheIndex(5.0)
    index.join("w", "i1")
    asked = index.take_piece("w", piece_for(index.new_dump("w"), worker))
    worker.change([3], [0, 1])
    new = piece_for(msgspec.structs.replace(asked, first=0), worker)
    assert index.take_piece("w", new) is None
    assert index._workers["w"].hashes == worker.hashes


def test_a_missing_number_asks_for_a_dump_and_keeps_a_hint_until_then() -> None:
    worker = TruthfulWorker()
    index = synced(worker)
    index.apply_events(worker.change([0], []))
    worker.change([], [0])
    assert index.apply_events(worker.change([2], []))
    assert (index.gaps, index.is_synced("w")) == (1, False)
    assert held(index, 0) == held(index, 2) == 1
    assert not index.apply_events(worker.change([3], []))
    assert held(index, 2, 3) == 2
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


def test_what_is_older_than_what_is_known_changes_nothing() -> None:
    worker = TruthfulWorker()
    index = synced(worker)
    old, event = worker.dump(), worker.change([0], [])
    assert not index.apply_events(event)
    assert not index.apply_events(worker.change([1], [0]))
    assert not index.apply_events(event), "no dump is needed"
    assert not index.apply_dump("w", old)
    assert index.is_synced("w")
    assert (held(index, 0), held(index, 1)) == (0, 1)


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


def test_what_is_expected_is_bounded_and_goes_without_new_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.routing.caches.expected_blocks.MAX_PENDING", 10)
    index = synced(TruthfulWorker())
    for number in range(10):
        index.expect("w", [digest(4 * number + each) for each in range(4)], now=0.0)
    assert len(index._expected.masks) == len(index._workers["w"].pending) == 8
    assert index.match("w", [digest(36)], 0.0).expected == 1
    assert index.match("w", [digest(0)], 0.0).expected == 0
    index.tidy(5.0)
    assert len(index._expected.masks) == len(index._workers["w"].routed) == 0


def test_a_prompt_that_is_routed_again_is_expected_as_long_again() -> None:
    index = synced(TruthfulWorker())
    index.expect("w", CHAIN[:2], now=0.0)
    index.expect("w", CHAIN[:1], now=4.0)
    index.expect("w", [digest(99)], now=6.0)
    assert index.match("w", CHAIN, 6.0) == PrefixMatch(held=0, expected=1)
    index.expect("w", [digest(98)], now=9.0)
    assert index.match("w", CHAIN, 8.0) == PrefixMatch(held=0, expected=0)


def test_the_load_report_reveals_that_the_last_event_was_lost() -> None:
    worker = TruthfulWorker()
    index = synced(worker)
    index.apply_events(worker.change([0], []))
    assert not index.check_seq("w", "i1", worker.seq)
    worker.change([1], [])
    assert not index.check_seq("w", "another", worker.seq)
    assert not index.check_seq("nobody", "i1", worker.seq)
    assert index.check_seq("w", "i1", worker.seq)
    assert not index.check_seq("w", "i1", worker.seq), "a dump is on its way already"
    assert not index.apply_dump("w", worker.dump())
    assert held(index, 0, 1) == 2


def test_a_dump_that_does_not_come_is_requested_again_ever_more_rarely() -> None:
    worker = TruthfulWorker()
    index = CacheIndex(5.0)
    index.join("w", "i1")
    asked = [now for now in range(100) if index.overdue(float(now))]
    assert asked == [2, 6, 14, 30, 62]
    index.apply_dump("w", worker.dump())
    assert not index.overdue(1000.0)
    worker.change([0], [])
    assert index.check_seq("w", "i1", worker.seq)
    assert not index.overdue(1000.0)
    assert index.overdue(1002.0) == ["w"]


def test_one_look_up_tells_of_all_workers() -> None:
    index = CacheIndex(5.0)
    workers = {name: TruthfulWorker(name) for name in "abcd"}
    for name, worker in workers.items():
        index.join(name, name)
        worker.change(list(range("abcd".index(name) * 2)), [])
        index.apply_dump(name, worker.dump())
    index.expect("b", CHAIN[2:4], now=1.0)
    index.expect("d", CHAIN[6:], now=1.0)
    assert index.matches(CHAIN, 2.0) == {
        "b": PrefixMatch(2, 4),
        "c": PrefixMatch(4, 4),
        "d": PrefixMatch(6, 8),
    }
    index.leave("d")
    assert set(index.matches(CHAIN, 2.0)) == {"b", "c"}
    assert set(index.matches(CHAIN, 7.0)) == {"b", "c"}
    assert index.match("b", CHAIN, 7.0) == PrefixMatch(2, 2)


def test_nothing_of_a_worker_that_left_is_left() -> None:
    index = CacheIndex(5.0)
    for number in range(50):
        worker = TruthfulWorker()
        worker.change([number % 3, 3], [])
        index.join("w", "i1")
        index.apply_dump("w", worker.dump())
        index.expect("w", CHAIN[4:], now=1.0)
        index.leave("w")
    assert (len(index._held), len(index._expected.masks), index._num_bits) == (0, 0, 1)


def test_a_worker_that_left_is_not_named_while_its_cache_leaves_the_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_lists, "SLICE", 2)
    worker = TruthfulWorker()
    worker.change(list(range(8)), [])
    index = synced(worker)
    for _ in range(4):
        index.tidy(0.0)
    index.leave("w")
    remaining = [each for each in CHAIN if index._held.of(each)]
    assert 0 < len(remaining) < len(CHAIN)
    assert index.matches(remaining, 0.0) == {}


def test_long_prompts_are_matched_to_the_block() -> None:
    numbers = list(range(EXACT_BLOCKS + 10 * STRIDE + 5))
    for count in (0, 1, EXACT_BLOCKS - 1, *range(EXACT_BLOCKS, EXACT_BLOCKS + 40), len(numbers)):
        worker = TruthfulWorker()
        worker.change(numbers[:count], [])
        assert held(synced(worker), *numbers) == count


def test_a_large_cache_comes_into_the_index_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_lists, "SLICE", 10)
    numbers = list(range(25))
    worker = TruthfulWorker()
    worker.change(numbers, [])
    index = synced(worker)
    assert len(index._held) == 10
    index.apply_events(worker.change([30], numbers[:5]))
    for _ in range(3):
        index.tidy(0.0)
    assert {n for n in range(40) if index._held.of(digest(n))} == {*numbers[5:], 30}


class CountingMasks(dict[bytes, int]):
    """Counts look-ups."""

    num_reads = 0

    def get(self, digest: bytes, default: int) -> int:
        self.num_reads += 1
        return super().get(digest, default)


def test_the_cost_of_a_look_up_grows_neither_with_the_workers_nor_with_each_block() -> None:
    """128,000 tokens, 100 workers that hold them all: far less than a look-up for each block."""
    hashes = [digest(each) for each in range(8000)]
    dump = CacheDump(incarnation="i", seq=0, hashes=hashes)
    index = CacheIndex(5.0)
    for number in range(100):
        index.join(f"w{number}", "i")
        index.apply_dump(f"w{number}", dump)
    while index.tidy(0.0):
        pass
    index._held._masks = masks = CountingMasks(index._held._masks)
    found = index.matches(hashes, 0.0)
    assert set(found.values()) == {PrefixMatch(8000, 8000)}
    assert len(found) == 100
    assert masks.num_reads <= EXACT_BLOCKS + len(hashes) // STRIDE + STRIDE


def test_more_blocks_than_a_worker_has_are_not_believed() -> None:
    """Neither in a dump that never ends, nor in events, before and after it."""
    index = CacheIndex(pending_ttl_s=10.0)
    index.join("w", "i1", num_blocks=10)
    asked = index.new_dump("w")
    hashes = [number.to_bytes(16, "big") for number in range(100)]
    piece = CacheDump(incarnation="i1", seq=1, hashes=hashes[:15], nonce=asked.nonce, is_last=False)
    asked = index.take_piece("w", piece)
    assert asked is not None
    with pytest.raises(ProtocolError, match="more than 20 blocks"):
        index.take_piece("w", msgspec.structs.replace(piece, nonce=asked.nonce, first=15))
    events = CacheEvents(worker_id="w", incarnation="i1", seq=1, stored=hashes, removed=[])
    with pytest.raises(ProtocolError, match="more than 20 blocks"):
        index.apply_events(events)
    assert index.num_blocks("w") == 0
    few = msgspec.structs.replace(events, stored=hashes[:4])
    for seq in range(50):
        index.apply_events(msgspec.structs.replace(few, seq=seq))
    assert len(index._workers["w"].buffer) <= 5
