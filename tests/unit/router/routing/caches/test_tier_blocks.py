"""What workers have in host memory and on disk behind the blocks of their pools."""

from __future__ import annotations

from itertools import pairwise

import pytest

from protocol.errors import ProtocolError
from protocol.events import CacheEvents, TierChange
from protocol.hashing import end_of
from protocol.messages import CacheDump, TierName
from router.routing.caches import block_lists, cache_index
from router.routing.caches.cache_index import CacheIndex, PrefixMatch

CHAIN = [number.to_bytes(16, "little") for number in range(12)]
HOST, DISK = TierName.HOST, TierName.DISK


def index_of(pool: int, host: range = range(0), disk: range = range(0)) -> CacheIndex:
    """Of one worker, which has the first `pool` blocks in its pool."""
    index = CacheIndex(pending_ttl_s=5.0)
    index.join("w", "i")
    in_host, on_disk = [CHAIN[each] for each in host], [CHAIN[each] for each in disk]
    dump = CacheDump(
        incarnation="i",
        seq=0,
        hashes=[*CHAIN[:pool], *in_host, *on_disk],
        num_host=len(in_host),
        num_disk=len(on_disk),
    )
    assert not index.apply_dump("w", dump)
    return index


def events(seq: int, *tiers: TierChange, removed: list[bytes] | None = None) -> CacheEvents:
    return CacheEvents(
        worker_id="w", incarnation="i", seq=seq, stored=[], removed=removed or [], tiers=list(tiers)
    )


@pytest.mark.parametrize(
    ("pool", "host", "disk", "match"),
    [
        (2, range(2, 5), range(5, 7), PrefixMatch(2, 2, in_host=3, on_disk=2)),
        (0, range(4), range(0), PrefixMatch(0, 0, in_host=4)),
        (3, range(2), range(1, 6), PrefixMatch(3, 3, on_disk=3)),
        (2, range(2, 6), range(2, 4), PrefixMatch(2, 2, in_host=4)),
        (2, range(4, 8), range(0), PrefixMatch(2, 2)),
        (0, range(1, 8), range(0), None),
    ],
    ids=["one after the other", "no pool", "copies of the pool", "in both", "a hole", "no start"],
)
def test_blocks_count_up_to_the_first_that_is_nowhere(
    pool: int, host: range, disk: range, match: PrefixMatch | None
) -> None:
    found = index_of(pool, host, disk).matches(CHAIN, 0.0)
    assert found == ({} if match is None else {"w": match})
    if match is not None:
        assert match.num_own == match.held + match.in_host + match.on_disk


def test_events_move_blocks_between_the_pool_and_the_tiers() -> None:
    index = index_of(4)
    evicted = events(1, TierChange(tier=HOST, stored=CHAIN[2:4]), removed=CHAIN[2:4])
    assert not index.apply_events(evicted)
    assert index.match("w", CHAIN, 0.0) == PrefixMatch(2, 2, in_host=2)
    sunk = events(
        2,
        TierChange(tier=DISK, stored=[CHAIN[3]]),
        TierChange(tier=HOST, removed=[CHAIN[3]]),
    )
    index.apply_events(sunk)
    assert index.match("w", CHAIN, 0.0) == PrefixMatch(2, 2, in_host=1, on_disk=1)
    index.apply_events(events(3, TierChange(tier=DISK, removed=[CHAIN[3]])))
    assert index.match("w", CHAIN, 0.0) == PrefixMatch(2, 2, in_host=1)


def test_expected_blocks_are_told_beside_them() -> None:
    index = index_of(1, range(1, 3))
    index.expect("w", CHAIN[:5], 0.0)
    assert index.match("w", CHAIN, 0.0) == PrefixMatch(1, 5, in_host=2)


def test_a_worker_that_left_has_no_tiers() -> None:
    index = index_of(0, range(4))
    index.leave("w")
    assert index.matches(CHAIN, 0.0) == {}
    index.join("another", "i")
    index.apply_dump("another", CacheDump(incarnation="i", seq=0, hashes=CHAIN[:2]))
    assert index.matches(CHAIN, 0.0) == {"another": PrefixMatch(2, 2)}


def test_a_worker_cannot_fill_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_index, "MOST_IN_TIERS", 4)
    index = index_of(2)
    with pytest.raises(ProtocolError, match="more than"):
        index.apply_events(events(1, TierChange(tier=HOST, stored=CHAIN[:5])))
    assert index.matches(CHAIN, 0.0) == {}
    asked = index.new_dump("w")
    dump = CacheDump(incarnation="i", seq=0, hashes=CHAIN[:5], nonce=asked.nonce, num_host=5)
    with pytest.raises(ProtocolError, match="more than"):
        index.take_piece("w", dump)


def test_tiers_count_towards_what_waits_for_a_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_index, "MOST_IN_TIERS", 4)
    index = CacheIndex(pending_ttl_s=5.0)
    index.join("w", "i", num_blocks=1)
    change = TierChange(tier=HOST, stored=CHAIN[:2], removed=CHAIN[2:4])
    assert not index.apply_events(events(1, change))
    assert index.apply_events(events(2, change)), "a new dump is needed"
    few = TierChange(tier=HOST, stored=[], removed=[])
    assert not index.apply_events(events(3, few)), "the new dump is waited for"


def test_a_dump_in_pieces_brings_the_tiers() -> None:
    index = CacheIndex(pending_ttl_s=5.0)
    index.join("w", "i", num_blocks=2)
    asked = index.new_dump("w")
    whole = CHAIN[:8]
    while asked is not None:
        last = asked.first + 3
        piece = CacheDump(
            incarnation="i",
            seq=0,
            hashes=whole[asked.first : last],
            nonce=asked.nonce,
            first=asked.first,
            is_last=last >= len(whole),
            num_host=4,
            num_disk=1,
        )
        asked = index.take_piece("w", piece)
    assert index.match("w", CHAIN, 0.0) == PrefixMatch(3, 3, in_host=4, on_disk=1)


@pytest.mark.parametrize("how", ["leave", "new list", "too many"])
def test_full_tiers_are_forgotten_slice_by_slice(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(block_lists, "SLICE", 3)
    index = index_of(0, range(8), range(8, 12))
    while index.tidy(0.0):
        pass
    assert index.match("w", CHAIN, 0.0) == PrefixMatch(0, 0, in_host=8, on_disk=4)
    if how == "leave":
        index.leave("w")
    elif how == "new list":
        index.apply_dump("w", CacheDump(incarnation="i", seq=1, hashes=CHAIN[:1]))
    else:
        monkeypatch.setattr(cache_index, "MOST_IN_TIERS", 4)
        with pytest.raises(ProtocolError):
            index.apply_events(events(1, TierChange(tier=HOST, stored=CHAIN[:1])))
    left = [len(index._tiers)]
    while index.tidy(0.0):
        assert index.match("w", CHAIN, 0.0).num_own == (how == "new list")
        left.append(len(index._tiers))
    assert left[0] > 0
    assert all(before - after <= 6 for before, after in pairwise([*left, len(index._tiers)]))
    assert len(index._tiers) == 0


@pytest.mark.parametrize(
    ("pool_end", "tier_ends"),
    [(0, []), (0, [6]), (3, [4, 6]), (0, [9]), (5, [])],
    ids=["none", "its end", "the last end", "beyond what there is", "the pool's end"],
)
def test_of_a_worker_with_windows_blocks_count_up_to_an_end(
    pool_end: int, tier_ends: list[int]
) -> None:
    """The pool has four blocks, host memory all to the seventh."""
    chain = [bytes([number]).ljust(16, b"x") for number in range(12)]
    index = CacheIndex(pending_ttl_s=5.0)
    index.join("w", "i", has_windows=True)
    pool = [*chain[:4], *([end_of(chain[pool_end - 1])] if pool_end else [])]
    host = [*chain[2:7], *(end_of(chain[end - 1]) for end in tier_ends)]
    dump = CacheDump(incarnation="i", seq=0, hashes=[*pool, *host], num_host=len(host), num_disk=0)
    assert not index.apply_dump("w", dump)
    held = pool_end if pool_end <= 4 else 0
    usable = max([pool_end, *[end for end in tier_ends if end <= 7]])
    match = index.match("w", chain, 0.0)
    assert (match.held, match.num_own) == (held, usable)
