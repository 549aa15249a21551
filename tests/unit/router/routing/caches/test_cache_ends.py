"""Workers whose layers keep windows: of the leading blocks, those up to the last end count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.events import CacheEvents
from protocol.hashing import end_of, next_hash
from protocol.messages import CacheDump
from router.routing.caches.cache_index import CacheIndex, PrefixMatch

CHAIN = [next_hash(b"", [each]) for each in range(8)]


def index_of(blocks: set[int], ends: set[int], windowed: bool = True) -> CacheIndex:
    """A worker with these blocks, whose cached prefixes can end behind so many blocks."""
    index = CacheIndex(pending_ttl_s=5.0)
    index.join("w", "i1", has_windows=windowed)
    hashes = [CHAIN[each] for each in blocks] + [end_of(CHAIN[each - 1]) for each in ends]
    index.apply_dump("w", CacheDump(incarnation="i1", seq=0, hashes=hashes))
    return index


@given(num_blocks=st.integers(0, 8), ends=st.sets(st.integers(1, 8)), num_hashes=st.integers(0, 8))
def test_a_match_is_the_last_end_inside_the_leading_run(
    num_blocks: int, ends: set[int], num_hashes: int
) -> None:
    index = index_of(set(range(num_blocks)), ends)
    usable = [each for each in ends if each <= min(num_blocks, num_hashes)]
    match = index.match("w", CHAIN[:num_hashes], 0.0)
    assert match == PrefixMatch(max(usable, default=0), max(usable, default=0))


def test_ends_are_no_blocks_of_workers_without_windows() -> None:
    assert index_of({0, 1, 2}, {2}, windowed=False).match("w", CHAIN, 0.0).held == 3


def test_an_end_that_was_evicted_no_longer_counts() -> None:
    index = index_of({0, 1, 2, 3}, {2, 3})
    gone = [end_of(CHAIN[2])]
    index.apply_events(CacheEvents(worker_id="w", incarnation="i1", seq=1, stored=[], removed=gone))
    assert index.match("w", CHAIN, 0.0).held == 2


def test_a_routed_prompt_is_expected_to_end_at_its_last_boundaries() -> None:
    index = index_of({0, 1, 2}, {3})
    index.expect("w", CHAIN[:6], now=0.0)
    assert index.match("w", CHAIN[:6], 1.0) == PrefixMatch(3, 6)
    assert index.match("w", CHAIN[:5], 1.0) == PrefixMatch(3, 5)
    assert index.match("w", CHAIN[:4], 1.0) == PrefixMatch(3, 3)
    assert index.match("w", CHAIN[:6], 9.0) == PrefixMatch(3, 3)


def test_a_new_prompt_is_expected_to_end_at_its_last_boundaries() -> None:
    index = index_of(set(), set())
    index.expect("w", CHAIN[:3], now=0.0)
    assert index.matches(CHAIN[:3], 1.0) == {"w": PrefixMatch(0, 3)}
    assert index.matches(CHAIN[:1], 1.0) == {}
