"""A fetch in the states of its source and its sink, one event after the other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kv_transfer.handoff.actions import (
    Close,
    Failed,
    Fetched,
    Lookup,
    PostWrite,
    Release,
    SendAbort,
    SendFetch,
    SendRenew,
    Unfence,
    Verify,
)
from kv_transfer.handoff.grants import WantedBlocks
from kv_transfer.handoff.incoming import FetchLimits
from kv_transfer.handoff.key import HandoffKey, IllegalMove
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from protocol.handoff_messages import (
    FetchShortfall,
    GroupBlocks,
    KvClosed,
    KvFetch,
    KvGrant,
    KvRenew,
    KvWritten,
)

KEY = HandoffKey("r", 1, 1)
C, H = "agent of C", "h-i"
TTL_S, LANDING_S, DEADLINE_S, STOP_S = 3.0, 1.0, 0.5, 0.25
WANTED = [(bytes([i]) * 16, 20 + i) for i in range(4)]
GRANT = WantedBlocks(3, WANTED)
BLOCKS = tuple(block for _, block in WANTED)
UNFENCE = Unfence(KEY, (BLOCKS,))
ABORT = SendAbort(KEY, H)


def made_sink(checksum: bool = False) -> HandoffSink:
    sink = HandoffSink(C, TTL_S, LANDING_S, checksum)
    (sent,) = sink.fetch(KEY, H, GRANT, FetchLimits(DEADLINE_S, STOP_S), now=0)
    assert isinstance(sent, SendFetch)
    assert (sent.fetch.part, sent.fetch.first_block, sent.fetch.block_ids) == (1, 3, list(BLOCKS))
    return sink


def written(first: int, number: int, digests: tuple[bytes, ...] = ()) -> KvWritten:
    return KvWritten(
        request_id="r", attempt=1, part=1, first_block=first, num_blocks=number,
        digests=list(digests),
    )  # fmt: skip


def closed(number: int = 0, error: str = "", **fields: Any) -> KvClosed:
    return KvClosed(request_id="r", attempt=1, part=1, num_blocks=number, error=error, **fields)


def test_it_is_over_when_all_granted_blocks_have_arrived() -> None:
    sink = made_sink()
    assert sink.written(written(3, 3)) == []
    assert sink.written(written(6, 1)) == [Fetched(KEY, 4), UNFENCE]
    assert sink.closed(closed(4), now=1) == []
    with pytest.raises(IllegalMove):
        sink.fetch(KEY, H, GRANT, FetchLimits(1, 1), now=1)


def test_a_source_that_has_less_says_so_and_the_sink_goes_on_with_that() -> None:
    sink = made_sink()
    assert sink.closed(closed(0, why=FetchShortfall.EVICTED), 0.1) == [Fetched(KEY, 0), UNFENCE]
    sink = made_sink()
    assert sink.closed(closed(2), now=0.1) == []
    assert sink.written(written(3, 2)) == [Fetched(KEY, 2), UNFENCE]


def test_notifications_that_never_come_are_not_waited_for_longer_than_writes_land() -> None:
    sink = made_sink()
    sink.written(written(3, 1))
    assert sink.closed(closed(3), now=0.1) == []
    assert sink.sweep(now=0.1 + LANDING_S) == [Fetched(KEY, 1), UNFENCE]


@pytest.mark.parametrize("number", [1, 5])
def test_impossible_counts_are_not_believed(number: int) -> None:
    sink = made_sink()
    sink.written(written(3, 2))
    failed, unfence = sink.closed(closed(number), now=0.1)
    assert isinstance(failed, Failed)
    assert (failed.arrived, unfence) == ((), UNFENCE)
    sink = made_sink()
    failed, abort = sink.written(written(5, 3))
    assert isinstance(failed, Failed)
    assert abort == ABORT


def test_one_that_takes_too_long_is_stopped_and_keeps_what_arrived() -> None:
    sink = made_sink()
    sink.written(written(3, 1))
    assert sink.sweep(now=DEADLINE_S) == [ABORT]
    assert sink.num_stopped == 1
    sink.written(written(4, 1))
    assert sink.closed(closed(3), now=0.6) == [Fetched(KEY, 2), UNFENCE]


def test_a_source_that_does_not_answer_is_left_alone_with_the_blocks() -> None:
    sink = made_sink()
    sink.written(written(3, 1))
    sink.sweep(now=DEADLINE_S)
    failed, abort = sink.sweep(now=DEADLINE_S + STOP_S)
    assert isinstance(failed, Failed)
    assert (failed.arrived, abort) == ((3,), ABORT)
    assert sink.is_open(KEY)
    assert sink.num_fenced_blocks == 4
    assert sink.sweep(now=99) == [ABORT], "until it is answered"
    assert sink.sweep(now=9999) == [ABORT]
    assert sink.closed(closed(1), now=9999) == [UNFENCE]


@pytest.mark.parametrize("is_stopping", [False, True])
@pytest.mark.parametrize("how", ["error", "gone"])
def test_what_a_lost_source_posted_may_still_land(how: str, is_stopping: bool) -> None:
    sink = made_sink()
    sink.written(written(3, 1))
    if is_stopping:
        sink.sweep(now=DEADLINE_S)
    lost = sink.closed(closed(0, "torn"), 0.6) if how == "error" else sink.agent_gone(H, 0.6)
    (failed,) = lost
    assert isinstance(failed, Failed)
    assert failed.arrived == (3,)
    assert sink.sweep(now=0.5 + LANDING_S) == []
    assert sink.sweep(now=0.6 + LANDING_S) == [UNFENCE]


def test_a_request_that_ends_leaves_its_blocks_behind_the_fence() -> None:
    sink = made_sink()
    assert sink.abort(KEY) == [ABORT]
    assert sink.closed(closed(0), now=1) == [UNFENCE]


def test_it_is_renewed_while_it_is_wanted() -> None:
    sink = HandoffSink(C, TTL_S, LANDING_S)
    sink.fetch(KEY, H, WantedBlocks(0, WANTED), FetchLimits(9, 9), now=0)
    (renew,) = sink.sweep(now=TTL_S / 3)
    assert isinstance(renew, SendRenew)
    assert renew.renew.part == 1


def test_a_digest_that_differs_shortens_the_prefix() -> None:
    sink = made_sink(checksum=True)
    digests = tuple(bytes([i]) for i in range(4))
    assert sink.written(written(3, 4, digests)) == [Verify(KEY, BLOCKS, digests)]
    assert sink.verified(KEY, ok=False, num_intact=2) == [Fetched(KEY, 2), UNFENCE]


FETCH = KvFetch(
    request_id="r", attempt=1, part=1, agent=C, first_block=3,
    hashes=[digest for digest, _ in WANTED], block_ids=list(BLOCKS), ttl_ms=3000,
)  # fmt: skip


def made_source() -> HandoffSource:
    return HandoffSource(margin_s=0.5, max_fetch_blocks=2)


def test_a_source_writes_what_it_found_in_small_writes_and_closes_with_the_number() -> None:
    source = made_source()
    assert source.fetch(FETCH, now=0) == [Lookup(FETCH)]
    first, second = source.found(FETCH, [[5, 6, 7]], FetchShortfall.EVICTED, now=0)
    assert isinstance(first, PostWrite)
    assert isinstance(second, PostWrite)
    assert (first.source_blocks, first.target_blocks, first.first_block) == ((5, 6), (20, 21), 3)
    assert (second.source_blocks, second.target_blocks, second.first_block) == ((7,), (22,), 5)
    assert first.notification().part == 1
    assert source.write_finished(first.write_id, None) == []
    assert source.write_finished(second.write_id, None) == [
        Close(KEY, C, "", 3, FetchShortfall.EVICTED),
        Release(KEY),
    ]
    assert source.fetch(FETCH, now=1) == [Close(KEY, C, "", 3)], "answered, not served again"


def test_a_source_without_the_blocks_closes_at_once() -> None:
    source = made_source()
    source.fetch(FETCH, now=0)
    assert source.found(FETCH, [[]], FetchShortfall.BUSY, now=0) == [
        Close(KEY, C, "", why=FetchShortfall.BUSY)
    ]
    assert source.num_open == 0


def test_an_unknown_fetch_that_is_aborted_or_renewed_is_never_served() -> None:
    for how in ("abort", "renew"):
        source = made_source()
        renew = KvRenew(request_id="r", attempt=1, part=1, ttl_ms=3000)
        told = source.abort(KEY, agent=C) if how == "abort" else source.renew(renew, C, now=0)
        assert told == [Close(KEY, C, "")]
        assert source.fetch(FETCH, now=0) == [Close(KEY, C, "")]


@pytest.mark.parametrize("how", ["abort", "expiry", "error", "lost"])
def test_no_write_follows_what_ends_a_fetch(how: str) -> None:
    source = made_source()
    source.fetch(FETCH, now=0)
    writes = source.found(FETCH, [[5, 6, 7, 8]], None, now=0)
    first, second = (each.write_id for each in writes if isinstance(each, PostWrite))
    if how == "abort":
        assert source.abort(KEY, agent=C) == []
    elif how == "expiry":
        source.sweep(now=3)
    elif how == "error":
        assert source.write_finished(first, "torn") == []
    else:
        source.peer_lost(C)
    if how != "error":
        assert source.write_finished(first, None) == []
    close, release = source.write_finished(second, None)
    assert release == Release(KEY)
    assert isinstance(close, Close)
    assert bool(close.error) == (how in ("error", "lost"))


@pytest.mark.parametrize(
    "changes",
    [
        {"part": 0},
        {"first_block": -1},
        {"block_ids": [1, 1, 2, 3]},
        {"hashes": []},
        {"others": [GroupBlocks(group=1, first_block=0, block_ids=[1])]},
    ],
)
def test_a_malformed_fetch_is_refused(changes: dict[str, Any]) -> None:
    strange = msgspec.structs.replace(FETCH, **changes)
    (close,) = made_source().fetch(strange, now=0)
    assert isinstance(close, Close)
    assert close.error == "the fetch is malformed"


def test_a_grant_does_not_fit_a_fetch_nor_a_fetch_a_handoff() -> None:
    """Parts are apart: the handoff of the same attempt goes its own way."""
    source = made_source()
    source.fetch(FETCH, now=0)
    source.found(FETCH, [[5, 6, 7, 8]], None, now=0)
    handoff = HandoffKey(KEY.request_id, KEY.attempt)
    grant = KvGrant(request_id="r", attempt=1, agent=C, first_block=0, block_ids=[1], ttl_ms=3000)
    assert source.grant(grant, now=0) == [Close(handoff, C, "the handoff is not known")]
    assert source.is_open(KEY)
    source.open(HandoffKey("r", 2), 4, now=0, grant_deadline=9)
    assert source.num_open == 2
