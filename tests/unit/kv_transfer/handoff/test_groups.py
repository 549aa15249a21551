"""Both sides of a handoff with several groups of layers, case by case."""

from __future__ import annotations

import msgspec
import pytest

from kv_transfer.handoff.actions import (
    Close,
    Complete,
    Failed,
    PostWrite,
    Release,
    SendAbort,
    SendGrant,
    SourceAction,
    Unfence,
    Verify,
)
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from protocol import wire
from protocol.handoff_messages import GroupBlocks, KvBegun, KvGrant, KvWritten
from tests.unit.kv_transfer.handoff.test_source import KEY, D, begin, grant

P = "prefill"

WINDOWED = (None, 3)
"""A layout with a full group and one that keeps three blocks."""


def grant_of_both(first: tuple[int, int], full: list[int], window: list[int]) -> KvGrant:
    others = [GroupBlocks(group=1, first_block=first[1], block_ids=window)]
    return msgspec.structs.replace(grant(first[0], *full), others=others)


def writes_by_group(actions: list[SourceAction]) -> list[tuple[int, tuple[int, ...], int]]:
    """(group, target, first block) of each; there must be nothing else."""
    assert all(isinstance(action, PostWrite) for action in actions)
    return [
        (action.group, action.target_blocks, action.first_block)
        for action in actions
        if isinstance(action, PostWrite)
    ]


def test_blocks_of_a_window_leave_once_the_prompt_is_computed() -> None:
    source = HandoffSource(margin_s=1.0, windows=WINDOWED)
    begin(source, 5)
    assert source.grant(grant_of_both((1, 3), [11, 12, 13, 14], [20, 21]), now=0) == []
    full = source.blocks_ready(KEY, 0, [70, 71, 72, 73, 74], chunk=0, now=1)
    assert writes_by_group(full) == [(0, (11, 12, 13, 14), 1)]
    window = source.blocks_ready(KEY, 2, [32, 33, 34], chunk=0, now=1, group=1)
    assert writes_by_group(window) == [(1, (20, 21), 3)]
    (write,) = window
    assert isinstance(write, PostWrite)
    assert (write.source_blocks, write.notification().group) == ((33, 34), 1)
    assert source.finish(KEY, now=1) == []
    assert source.write_finished(write.write_id, None) == []
    assert source.write_finished(full[0].write_id, None) == [Close(KEY, D, ""), Release(KEY)]


def test_a_grant_for_a_block_before_the_window_fails() -> None:
    source = HandoffSource(margin_s=1.0, windows=WINDOWED)
    begin(source, 5)
    source.grant(grant_of_both((5, 1), [], [20, 21, 22, 23]), now=0)
    source.blocks_ready(KEY, 0, [70, 71, 72, 73, 74], chunk=0, now=1)
    reason = "block 1 of group 1 is no longer kept here"
    failed = source.blocks_ready(KEY, 2, [32, 33, 34], chunk=0, now=1, group=1)
    assert failed == [Close(KEY, D, reason), Release(KEY)]


def test_a_prompt_is_not_finished_before_each_group_is_ready() -> None:
    source = HandoffSource(margin_s=1.0, windows=WINDOWED)
    begin(source, 2)
    source.blocks_ready(KEY, 0, [70, 71], chunk=0, now=1)
    with pytest.raises(ValueError, match="0 blocks of 2 are ready"):
        source.finish(KEY, now=1)


@pytest.mark.parametrize(
    "others",
    [
        [],
        [GroupBlocks(group=2, first_block=0, block_ids=[20, 21])],
        [GroupBlocks(group=1, first_block=0, block_ids=[20, 20])],
        [GroupBlocks(group=1, first_block=0, block_ids=[20, 21])] * 2,
    ],
)
def test_a_grant_names_each_group_once(others: list[GroupBlocks]) -> None:
    source = HandoffSource(margin_s=1.0, windows=WINDOWED)
    begin(source, 2)
    closed, released = source.grant(msgspec.structs.replace(grant(0, 10, 11), others=others), now=0)
    assert isinstance(closed, Close)
    assert "the grant" in closed.error
    assert released == Release(KEY)


def offered(checksum: bool = False) -> HandoffSink:
    """Blocks 1 and 2 of the first group, and block 2 of the second, are granted."""
    sink = HandoffSink("decode", ttl_s=3.0, landing_s=2.0, checksum=checksum)
    sink.ask(KEY, P, now=0)
    sink.begun(KvBegun(request_id="r", attempt=1))
    window = GroupBlocks(group=1, first_block=2, block_ids=[40])
    (sent,) = sink.offer(KEY, 1, [7, 8], now=0, others=[window])
    assert isinstance(sent, SendGrant)
    assert sent.grant.groups[1:] == [window]
    assert sink.num_fenced_blocks == 3
    return sink


def written(group: int, first_block: int, *digests: bytes, count: int = 1) -> KvWritten:
    return KvWritten(
        request_id="r",
        attempt=1,
        group=group,
        first_block=first_block,
        num_blocks=count,
        digests=list(digests),
    )


FREE = Unfence(KEY, ((7, 8), (40,)))


def test_a_handoff_is_complete_once_the_blocks_of_every_group_are_here() -> None:
    sink = offered()
    assert sink.written(written(0, 1, count=2)) == []
    assert sink.written(written(0, 1, count=2)) == []
    assert sink.written(written(1, 2)) == [Complete(KEY), FREE]
    assert sink.blocks_received == 3


@pytest.mark.parametrize("strange", [written(1, 1), written(2, 2), written(1, 2, count=2)])
def test_blocks_of_a_group_that_were_not_granted_fail_the_handoff(strange: KvWritten) -> None:
    failed, abort = offered().written(strange)
    assert isinstance(failed, Failed)
    assert abort == SendAbort(KEY, P)


def test_digests_are_compared_group_by_group() -> None:
    sink = offered(checksum=True)
    assert sink.written(written(1, 2, b"c")) == []
    check = sink.written(written(0, 1, b"a", b"b", count=2))
    assert check == [Verify(KEY, (7, 8), (b"a", b"b"), group=0)]
    assert sink.verified(KEY, ok=True) == [Verify(KEY, (40,), (b"c",), group=1)]
    assert sink.verified(KEY, ok=True) == [Complete(KEY), FREE]


def test_a_wrong_digest_of_any_group_fails_the_handoff() -> None:
    sink = offered(checksum=True)
    sink.written(written(1, 2, b"c"))
    sink.written(written(0, 1, b"a", b"b", count=2))
    sink.verified(KEY, ok=True)
    assert sink.verified(KEY, ok=False) == [Failed(KEY, "the digest of a block differs", ()), FREE]


def test_messages_of_a_layout_with_one_group_name_none() -> None:
    for message in (grant(1, 10, 11), written(0, 1)):
        assert b"group" not in wire.encode(message)
        assert b"others" not in wire.encode(message)
