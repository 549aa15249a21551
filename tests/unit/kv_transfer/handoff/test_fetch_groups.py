"""A fetch of a layout with windows: the blocks of the first group, and slots for the others."""

from __future__ import annotations

import msgspec
import pytest

from kv_transfer.handoff.actions import (
    Close,
    Failed,
    Fetched,
    Lookup,
    PostWrite,
    Release,
    SendFetch,
    SourceAction,
    Unfence,
    Verify,
)
from kv_transfer.handoff.grants import WantedBlocks
from kv_transfer.handoff.incoming import FetchLimits
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from protocol.handoff_messages import FetchShortfall, GroupBlocks, KvFetch, KvWritten
from tests.unit.kv_transfer.handoff.test_fetch import (
    ABORT,
    DEADLINE_S,
    FETCH,
    KEY,
    LANDING_S,
    STOP_S,
    TTL_S,
    WANTED,
    C,
    H,
    closed,
    written,
)

SLOTS = [40, 41]
UNFENCE = Unfence(KEY, ((20, 21, 22, 23), (40, 41)))
OTHERS = [GroupBlocks(group=1, first_block=0, block_ids=SLOTS)]
GROUPED: KvFetch = msgspec.structs.replace(FETCH, others=OTHERS)


def made_sink(checksum: bool = False) -> HandoffSink:
    sink = HandoffSink(C, TTL_S, LANDING_S, checksum)
    wanted = WantedBlocks(3, WANTED, OTHERS)
    (sent,) = sink.fetch(KEY, H, wanted, FetchLimits(DEADLINE_S, STOP_S), now=0)
    assert isinstance(sent, SendFetch)
    assert sent.fetch.others == OTHERS
    return sink


def in_slots(first: int, number: int, digests: tuple[bytes, ...] = ()) -> KvWritten:
    return msgspec.structs.replace(written(first, number, digests), group=1)


def test_it_is_over_when_blocks_and_slots_have_arrived() -> None:
    sink = made_sink()
    assert sink.written(in_slots(0, 2)) == []
    assert sink.written(written(3, 4)) == [Fetched(KEY, 4), UNFENCE]


def test_a_shorter_run_fills_the_slots_all_the_same() -> None:
    sink = made_sink()
    assert sink.closed(closed(2), now=0.1) == []
    assert sink.written(written(3, 2)) == []
    assert sink.written(in_slots(0, 2)) == [Fetched(KEY, 2), UNFENCE]


def test_a_run_that_is_shorter_than_the_window_leaves_slots_empty() -> None:
    sink = made_sink()
    assert sink.written(written(3, 1)) == []
    assert sink.written(in_slots(0, 1)) == []
    assert sink.closed(closed(1), now=0.1) == [Fetched(KEY, 1), UNFENCE]


def test_a_part_is_of_no_use() -> None:
    sink = made_sink()
    sink.written(written(3, 2))
    assert sink.sweep(now=DEADLINE_S) == [ABORT]
    assert sink.closed(closed(0), now=0.6) == [Fetched(KEY, 0), UNFENCE]
    sink = made_sink()
    sink.written(written(3, 4))
    assert sink.closed(closed(4), now=0.1) == []
    assert sink.sweep(now=0.1 + LANDING_S) == [Fetched(KEY, 0), UNFENCE]


def test_a_wrong_digest_of_a_slot_leaves_nothing() -> None:
    sink = made_sink(checksum=True)
    sink.written(in_slots(0, 2, (b"y", b"z")))
    check = sink.written(written(3, 4, (b"a", b"b", b"c", b"d")))
    assert check == [Verify(KEY, (20, 21, 22, 23), (b"a", b"b", b"c", b"d"))]
    assert sink.verified(KEY, ok=True) == [Verify(KEY, (40, 41), (b"y", b"z"), group=1)]
    assert sink.verified(KEY, ok=False, num_intact=1) == [Fetched(KEY, 0), UNFENCE]


@pytest.mark.parametrize("strange", [in_slots(1, 2), in_slots(2, 1)])
def test_slots_that_were_not_granted_fail_the_fetch(strange: KvWritten) -> None:
    failed, _ = made_sink().written(strange)
    assert isinstance(failed, Failed)


def posted(actions: list[SourceAction]) -> list[PostWrite]:
    assert all(isinstance(each, PostWrite) for each in actions)
    return [each for each in actions if isinstance(each, PostWrite)]


def made_source() -> HandoffSource:
    source = HandoffSource(margin_s=0.5, windows=(None, 32))
    assert source.fetch(GROUPED, now=0) == [Lookup(GROUPED)]
    return source


def test_a_source_writes_the_run_and_the_window_before_its_end() -> None:
    source = made_source()
    writes = posted(source.found(GROUPED, [[5, 6], [70, 71]], FetchShortfall.EVICTED, now=0))
    assert [(w.group, w.source_blocks, w.target_blocks, w.first_block) for w in writes] == [
        (0, (5, 6), (20, 21), 3),
        (1, (70, 71), (40, 41), 0),
    ]
    assert source.write_finished(writes[0].write_id, None) == []
    assert source.write_finished(writes[1].write_id, None) == [
        Close(KEY, C, "", 2, FetchShortfall.EVICTED),
        Release(KEY),
    ]


def test_a_source_that_has_no_end_closes_at_once() -> None:
    closed_at_once = [Close(KEY, C, "", why=FetchShortfall.EVICTED)]
    assert made_source().found(GROUPED, [[], []], FetchShortfall.EVICTED, now=0) == closed_at_once


def test_a_source_that_could_not_write_all_says_that_it_wrote_nothing() -> None:
    source = HandoffSource(margin_s=0.5, windows=(None, 32))
    short = msgspec.structs.replace(GROUPED, ttl_ms=100)
    source.fetch(short, now=0)
    assert source.found(short, [[5, 6], [70, 71]], None, now=0) == []
    assert source.sweep(now=1) == [Close(KEY, C, "the grant expired"), Release(KEY)]


def test_a_fetch_without_slots_is_malformed() -> None:
    source = HandoffSource(margin_s=0.5, windows=(None, 32))
    assert source.fetch(FETCH, now=0) == [Close(KEY, C, "the fetch is malformed")]
