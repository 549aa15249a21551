"""What a sharded receiver and a sharded sender do with the lanes of one handoff."""

from __future__ import annotations

from typing import Any

import pytest

from kv_transfer.handoff import actions
from kv_transfer.handoff.key import HandoffKey, IllegalMove
from kv_transfer.handoff.sharded_receiver import ShardedReceiver
from kv_transfer.handoff.sharded_sender import ForLane, ShardedSender
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from protocol.messages import KvAsk, KvBegun, KvClosed, KvGrant, KvWritten

TTL_S = 3.0
LANDING_S = 2.0
KEY = HandoffKey("r", 1)


def written(rank: int, first: int, size: int) -> tuple[int, KvWritten]:
    note = KvWritten(request_id="r", attempt=1, first_block=first, num_blocks=size, tp_rank=rank)
    return rank, note


BEGUN = KvBegun(request_id="r", attempt=1)


def asking() -> ShardedReceiver:
    made = ShardedReceiver(lambda: HandoffSink("me", TTL_S, LANDING_S))
    asks = made.ask(KEY, {0: "a", 1: "b"}, 0.0)
    assert [(type(ask), ask.peer) for ask in asks] == [
        (actions.SendAsk, "a"),
        (actions.SendAsk, "b"),
    ]
    return made


def receiver() -> ShardedReceiver:
    made = asking()
    made.begun(0, BEGUN)
    made.begun(1, BEGUN)
    grants = made.offer(KEY, 2, (5, 6, 7), 0.0)
    assert [(type(grant), grant.peer) for grant in grants] == [
        (actions.SendGrant, "a"),
        (actions.SendGrant, "b"),
    ]
    return made


def test_blocks_may_be_granted_when_every_rank_has_begun() -> None:
    made = asking()
    assert made.begun(1, BEGUN) == []
    assert made.begun(1, BEGUN) == []
    with pytest.raises(IllegalMove, match="before its sources have begun"):
        made.offer(KEY, 2, (5, 6, 7), 0.0)
    assert made.begun(0, BEGUN) == [actions.Begun(KEY)]


def test_one_rank_that_closes_before_the_grant_ends_the_ask_to_all() -> None:
    made = asking()
    made.begun(0, BEGUN)
    assert made.closed(1, KvClosed(request_id="r", attempt=1, error="torn"), 1.0) == [
        actions.Failed(KEY, "rank 1: torn", ()),
        actions.SendAbort(KEY, "a"),
    ]
    assert made.num_open == 0
    assert made.sweep(9.0) == []


def test_an_ask_that_is_given_up_is_taken_back_from_every_rank() -> None:
    made = asking()
    assert made.abort(KEY) == [actions.SendAbort(KEY, "a"), actions.SendAbort(KEY, "b")]
    assert made.begun(0, BEGUN) == []
    assert made.sweep(9.0) == []


def test_a_block_is_there_when_it_is_by_every_rank() -> None:
    made = receiver()
    assert made.written(*written(0, 2, 3)) == []
    assert made.arrived(KEY) == ()
    assert made.written(*written(1, 3, 1)) == []
    assert made.written(*written(1, 3, 1)) == []
    assert made.arrived(KEY) == (3,)
    assert made.written(*written(1, 2, 1)) == []
    last = made.written(*written(1, 4, 1))
    assert last == [actions.Complete(KEY), actions.Unfence(KEY, (5, 6, 7))]
    assert made.written(*written(1, 4, 1)) == []
    assert made.ignored == 1


def test_the_death_of_one_rank_ends_the_handoff_and_fences_stand_until_all_have_fallen() -> None:
    made = receiver()
    made.written(*written(0, 2, 2))
    made.written(*written(1, 2, 1))
    assert made.agent_gone("b", 1.0) == [
        actions.Failed(KEY, "rank 1: the source is gone", (2,)),
        actions.SendAbort(KEY, "a"),
    ]
    assert made.sweep(1.0 + LANDING_S) == [actions.SendAbort(KEY, "a")]
    assert made.is_open(KEY)
    closed = KvClosed(request_id="r", attempt=1)
    assert made.closed(0, closed, 4.0) == [actions.Unfence(KEY, (5, 6, 7))]
    assert made.num_open == 0
    assert made.is_known(KEY)


def test_what_cannot_be_asked_for() -> None:
    made = receiver()
    with pytest.raises(IllegalMove):
        made.ask(KEY, {0: "a"}, 0.0)
    with pytest.raises(ValueError, match="several processes"):
        made.ask(HandoffKey("s", 1), {0: "a", 1: "a"}, 0.0)
    with pytest.raises(ValueError, match="several processes"):
        made.ask(HandoffKey("s", 1), {}, 0.0)
    assert made.written(*written(7, 2, 1)) == []
    assert made.ignored == 1


def writes(asked_for: list[Any]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(target rank, source blocks, target blocks) of all writes."""
    return [
        (lane.target, lane.action.source_blocks, lane.action.target_blocks)
        for lane in asked_for
        if isinstance(lane, ForLane) and isinstance(lane.action, actions.PostWrite)
    ]


def begin(sender: ShardedSender) -> None:
    """Both lanes are asked for, and the prompt has begun."""
    ask = KvAsk(request_id="r", attempt=1, agent="d", ttl_ms=9000)
    assert sender.ask(0, ask, 0.0) == []
    assert sender.begin(KEY, 0.0) == [ForLane(0, actions.SendBegun(KEY, "d"))]
    assert sender.ask(1, ask, 0.0) == [ForLane(1, actions.SendBegun(KEY, "d"))]


def grant(first_block: int, blocks: list[int]) -> KvGrant:
    return KvGrant(
        request_id="r", attempt=1, agent="d", first_block=first_block, block_ids=blocks, ttl_ms=9000
    )


def test_one_prompt_feeds_all_lanes_and_is_let_go_of_once() -> None:
    sender = ShardedSender(lambda: HandoffSource(0.5))
    assert sender.open(KEY, [0, 1], 2, 0.0, 5.0) == []
    begin(sender)
    assert sender.blocks_ready(KEY, 0, [8, 9], 0, 0.0) == []
    first = sender.grant(0, grant(1, [4]), 0.0)
    assert writes(first) == [(0, (9,), (4,))]
    second = sender.grant(1, grant(0, [6, 7]), 0.0)
    assert writes(second) == [(1, (8, 9), (6, 7))]
    assert sender.finish(KEY, 0.0) == []
    (closed,) = sender.write_finished(0, first[0].action.write_id, None)
    assert closed == ForLane(0, actions.Close(KEY, "d", ""))
    failed, released = sender.write_finished(1, second[0].action.write_id, "cut")
    assert failed == ForLane(1, actions.Close(KEY, "d", "cut"))
    assert released == actions.Release(KEY)
    assert sender.num_open == sender.num_outstanding == 0


def test_a_lane_that_nobody_grants_does_not_hold_up_the_others() -> None:
    sender = ShardedSender(lambda: HandoffSource(0.5))
    sender.open(KEY, [0, 1], 1, 0.0, 5.0)
    begin(sender)
    sender.blocks_ready(KEY, 0, [8], 0, 0.0)
    sender.finish(KEY, 0.0)
    (write,) = sender.grant(1, grant(0, [4]), 0.0)
    assert len(sender.write_finished(1, write.action.write_id, None)) == 1, "still pinned"
    late = actions.Close(KEY, "d", "no grant came in time")
    assert sender.sweep(5.0) == [ForLane(0, late), actions.Release(KEY)]
    with pytest.raises(ValueError, match="no target rank"):
        sender.open(HandoffKey("s", 1), [], 1, 0.0, 5.0)
