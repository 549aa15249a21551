"""The decode side of a handoff, case by case."""

from __future__ import annotations

from math import inf

import pytest

from kv_transfer.handoff.actions import (
    Begun,
    Complete,
    Failed,
    SendAbort,
    SendAsk,
    SendGrant,
    SendRenew,
    SinkAction,
    Unfence,
    Verify,
)
from kv_transfer.handoff.key import ClosedHandoffs, HandoffKey, IllegalMove
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.states import SinkEvent, SinkState, sink_transition
from protocol.handoff_messages import KvAsk, KvBegun, KvClosed, KvGrant, KvRenew, KvWritten

KEY = HandoffKey("r", 1)
P = "prefill"
BLOCKS = (7, 8, 9)
UNFENCE = Unfence(KEY, (BLOCKS,))


def written(first_block: int, num_blocks: int, *digests: bytes) -> KvWritten:
    return KvWritten(
        request_id="r",
        attempt=1,
        first_block=first_block,
        num_blocks=num_blocks,
        digests=list(digests),
    )


BEGUN = KvBegun(request_id="r", attempt=1)


def offer(
    sink: HandoffSink, key: HandoffKey, peer: str, first_block: int, blocks: tuple[int, ...]
) -> list[SinkAction]:
    """All up to the grant, at time 0."""
    sink.ask(key, peer, now=0)
    sink.begun(KvBegun(request_id=key.request_id, attempt=key.attempt))
    return sink.offer(key, first_block, blocks, now=0)


def closed(error: str = "") -> KvClosed:
    return KvClosed(request_id="r", attempt=1, error=error)


@pytest.fixture
def sink() -> HandoffSink:
    return HandoffSink("decode", ttl_s=3.0, landing_s=2.0)


@pytest.fixture
def offered(sink: HandoffSink) -> HandoffSink:
    """Blocks 2, 3 and 4 of the prompt are granted at time 0."""
    offer(sink, KEY, P, 2, BLOCKS)
    return sink


def test_an_ask_reserves_nothing_and_is_repeated_until_something_is_granted(
    sink: HandoffSink,
) -> None:
    ask = SendAsk(P, KvAsk(request_id="r", attempt=1, agent="decode", ttl_ms=3000))
    assert sink.ask(KEY, P, now=0) == [ask]
    assert (sink.num_open, sink.is_asking(KEY), sink.is_known(KEY)) == (0, True, True)
    assert sink.sweep(now=0.9) == []
    assert sink.sweep(now=1.0) == [ask]
    assert sink.begun(BEGUN) == [Begun(KEY)]
    assert sink.begun(BEGUN) == []
    assert sink.sweep(now=2.0) == [ask]
    sink.offer(KEY, 2, BLOCKS, now=2.5)
    assert sink.begun(BEGUN) == []
    assert sink.sweep(now=3.0) == []
    assert sink.ignored == 0


def test_asks_are_repeated_each_in_its_time(sink: HandoffSink) -> None:
    keys = [HandoffKey(name, 1) for name in "abc"]
    for i, key in enumerate(keys):
        sink.ask(key, P, now=0.1 * i)

    def asked(now: float) -> list[str]:
        swept = sink.sweep(now)
        return [action.ask.request_id for action in swept if isinstance(action, SendAsk)]

    assert asked(1.05) == ["a"]
    assert asked(1.5) == ["b", "c"]
    assert asked(2.1) == ["a"]


def test_nothing_is_offered_before_the_source_has_begun(sink: HandoffSink) -> None:
    with pytest.raises(IllegalMove, match="before its source has begun"):
        sink.offer(KEY, 2, BLOCKS, now=0)
    sink.ask(KEY, P, now=0)
    with pytest.raises(IllegalMove, match="before its source has begun"):
        sink.offer(KEY, 2, BLOCKS, now=0)


@pytest.mark.parametrize("has_begun", [False, True])
def test_what_ends_an_ask_leaves_no_fence(has_begun: bool) -> None:
    ends = {
        "": lambda sink: sink.abort(KEY),
        "torn": lambda sink: sink.closed(closed("torn"), now=1),
        "the source closed before anything was granted": lambda sink: sink.closed(closed(), now=1),
        "the source is gone": lambda sink: sink.agent_gone(P, now=1),
    }
    for reason, end in ends.items():
        sink = HandoffSink("decode", ttl_s=3.0, landing_s=2.0)
        sink.ask(KEY, P, now=0)
        if has_begun:
            sink.begun(BEGUN)
        wanted = Failed(KEY, reason, ()) if reason else SendAbort(KEY, P)
        assert end(sink) == [wanted]
        assert (sink.num_open, sink.is_asking(KEY)) == (0, False)
        assert sink.sweep(now=100.0) == []
        assert sink.begun(BEGUN) == []
        with pytest.raises(IllegalMove, match="twice"):
            sink.ask(KEY, P, now=100.0)


def test_the_grant_says_where_and_how_long(sink: HandoffSink) -> None:
    grant = KvGrant(
        request_id="r", attempt=1, agent="decode", first_block=2, block_ids=[7, 8, 9], ttl_ms=3000
    )
    assert offer(sink, KEY, P, 2, BLOCKS) == [SendGrant(P, grant)]
    assert sink.num_fenced_blocks == 3


def test_blocks_are_counted_not_messages(offered: HandoffSink) -> None:
    assert offered.written(written(4, 1)) == []
    assert offered.written(written(4, 1)) == []
    assert offered.written(written(3, 2)) == []
    assert offered.written(written(2, 1)) == [Complete(KEY), UNFENCE]
    assert offered.closed(closed(), now=1) == []
    assert (offered.num_open, offered.num_fenced_blocks, offered.ignored) == (0, 0, 0)


def test_nothing_to_send_is_complete_at_once(sink: HandoffSink) -> None:
    grant, *rest = offer(sink, KEY, P, 5, ())
    assert isinstance(grant, SendGrant)
    assert rest == [Complete(KEY), Unfence(KEY, ((),))]
    assert sink.closed(closed(), now=1) == []
    assert sink.ignored == 0


def test_a_wanted_grant_is_renewed_every_third_of_its_life(offered: HandoffSink) -> None:
    again = SendRenew(P, KvRenew(request_id="r", attempt=1, ttl_ms=3000))
    assert offered.sweep(now=0.9) == []
    assert offered.sweep(now=1.0) == [again]
    assert offered.sweep(now=1.5) == []
    assert offered.sweep(now=2.0) == [again]
    assert offered.sweep(now=1000.0) == [again]  # no timeout of ours lifts the fence


def test_an_abort_is_asked_for_until_it_is_answered(offered: HandoffSink) -> None:
    ask = SendAbort(KEY, P)
    assert offered.abort(KEY) == [ask]
    assert offered.abort(KEY) == []
    assert offered.sweep(now=1.0) == [ask]
    assert offered.sweep(now=1000.0) == [ask]
    assert offered.num_fenced_blocks == 3
    assert offered.closed(closed(), now=1001.0) == [UNFENCE]
    assert offered.ignored == 0


def test_an_abort_is_over_when_all_has_arrived_anyway(offered: HandoffSink) -> None:
    offered.abort(KEY)
    assert offered.written(written(2, 3)) == [UNFENCE]


def test_closing_with_an_error_fails_now_and_unfences_after_landing(
    offered: HandoffSink,
) -> None:
    offered.written(written(2, 1))
    assert offered.closed(closed("torn"), now=1.0) == [Failed(KEY, "torn", (2,))]
    assert offered.closed(closed("torn"), now=1.5) == []
    assert offered.abort(KEY) == []
    assert offered.sweep(now=2.9) == []
    assert offered.sweep(now=3.0) == [UNFENCE]


def test_closing_in_order_before_the_notifications(offered: HandoffSink) -> None:
    offered.written(written(2, 1))
    assert offered.closed(closed(), now=1.0) == []
    assert offered.sweep(now=1.1) == []
    assert offered.written(written(3, 2)) == [Complete(KEY), UNFENCE]


def test_closing_in_order_without_all_blocks_fails(offered: HandoffSink) -> None:
    offered.written(written(3, 1))
    offered.closed(closed(), now=1.0)
    reason = "the source closed before every block had arrived"
    assert offered.sweep(now=3.0) == [Failed(KEY, reason, (3,)), UNFENCE]


def test_aborting_what_closed_in_order_unfences_at_once(offered: HandoffSink) -> None:
    offered.closed(closed(), now=1.0)
    assert offered.abort(KEY) == [UNFENCE]


def test_a_dead_peer_fails_its_handoffs_and_keeps_what_arrived(offered: HandoffSink) -> None:
    offer(offered, HandoffKey("s", 1), "other", 0, (1,))
    offered.written(written(2, 2))
    gone = "the source is gone"
    assert offered.agent_gone(P, now=5.0) == [Failed(KEY, gone, (2, 3))]
    assert offered.agent_gone(P, now=6.0) == []
    assert UNFENCE not in offered.sweep(now=6.9)
    assert UNFENCE in offered.sweep(now=7.0)
    assert offered.num_open == 1


def test_a_dead_peer_may_write_until_its_connections_are_cut(offered: HandoffSink) -> None:
    """It fails at once, but the time for landing begins with the cut; a peer that has come back
    meanwhile is not meant."""
    assert offered.agent_gone(P, now=inf) == [Failed(KEY, "the source is gone", ())]
    again = HandoffKey("r", 2)
    offer(offered, again, P, 2, (1,))
    assert UNFENCE not in offered.sweep(now=100.0)
    offered.cut(now=100.0)
    offered.cut(now=101.0)
    assert UNFENCE not in offered.sweep(now=101.9)
    assert UNFENCE in offered.sweep(now=102.0)
    assert offered.is_open(again)


def test_a_peer_that_dies_while_aborting(offered: HandoffSink) -> None:
    offered.abort(KEY)
    assert offered.agent_gone(P, now=5.0) == []
    assert offered.sweep(now=7.0) == [UNFENCE]


@pytest.mark.parametrize(
    "strange", [written(1, 1), written(4, 2), written(5, 1), written(2, 0), written(2, 1, b"x")]
)
def test_blocks_that_were_not_granted_fail_the_attempt(
    offered: HandoffSink, strange: KvWritten
) -> None:
    offered.written(written(2, 1))
    failed, ask = offered.written(strange)
    assert isinstance(failed, Failed)
    assert failed.arrived == ()
    assert ask == SendAbort(KEY, P)
    assert offered.written(strange) == []
    assert offered.ignored == 1
    assert offered.closed(closed(), now=1.0) == [UNFENCE]


def test_digests_are_compared_before_completion() -> None:
    sink = HandoffSink("decode", ttl_s=3.0, landing_s=2.0, checksum=True)
    offer(sink, KEY, P, 2, BLOCKS)
    sink.written(written(4, 1, b"e"))
    assert sink.written(written(2, 2, b"c", b"d")) == [Verify(KEY, BLOCKS, (b"c", b"d", b"e"))]
    assert sink.sweep(now=100.0) == []
    assert sink.agent_gone(P, now=100.0) == []
    assert sink.verified(KEY, ok=True) == [Complete(KEY), UNFENCE]
    assert sink.verified(KEY, ok=True) == []
    assert sink.ignored == 1


def test_a_wrong_digest_fails_the_attempt_and_counts_nothing_as_arrived() -> None:
    sink = HandoffSink("decode", ttl_s=3.0, landing_s=2.0, checksum=True)
    offer(sink, KEY, P, 2, BLOCKS)
    sink.written(written(2, 3, b"c", b"d", b"e"))
    assert sink.verified(KEY, ok=False) == [
        Failed(KEY, "the digest of a block differs", ()),
        UNFENCE,
    ]


def test_aborting_while_verifying_unfences() -> None:
    sink = HandoffSink("decode", ttl_s=3.0, landing_s=2.0, checksum=True)
    offer(sink, KEY, P, 2, BLOCKS)
    sink.written(written(2, 3, b"c", b"d", b"e"))
    assert sink.abort(KEY) == [UNFENCE]
    assert sink.verified(KEY, ok=True) == []


def test_missing_digests_fail_the_attempt() -> None:
    sink = HandoffSink("decode", ttl_s=3.0, landing_s=2.0, checksum=True)
    offer(sink, KEY, P, 2, BLOCKS)
    failed, ask = sink.written(written(2, 2, b"c"))
    assert isinstance(failed, Failed)
    assert ask == SendAbort(KEY, P)


def test_unverified_blocks_do_not_count_as_arrived() -> None:
    sink = HandoffSink("decode", ttl_s=3.0, landing_s=2.0, checksum=True)
    offer(sink, KEY, P, 2, BLOCKS)
    sink.written(written(2, 1, b"c"))
    assert sink.closed(closed("torn"), now=1.0) == [Failed(KEY, "torn", ())]


def test_what_arrives_for_unknown_handoffs_is_counted(sink: HandoffSink) -> None:
    assert sink.written(written(0, 1)) == []
    assert sink.closed(closed(), now=0) == []
    assert sink.abort(KEY) == []
    assert sink.verified(KEY, ok=True) == []
    assert sink.begun(BEGUN) == []
    assert sink.ignored == 5


def test_a_handoff_is_asked_for_once(offered: HandoffSink) -> None:
    with pytest.raises(IllegalMove, match="twice"):
        offered.ask(KEY, P, now=0)
    offered.written(written(2, 3))
    with pytest.raises(IllegalMove, match="twice"):
        offered.ask(KEY, P, now=0)


def test_an_ended_handoff_does_not_move() -> None:
    for event in SinkEvent:
        with pytest.raises(IllegalMove, match="when ended"):
            sink_transition(SinkState.ENDED, event)
    with pytest.raises(IllegalMove):
        sink_transition(SinkState.ABORTING, SinkEvent.EXPIRE)


def test_the_memory_of_closed_handoffs_is_bounded() -> None:
    ended = ClosedHandoffs(capacity=2)
    keys = [HandoffKey("r", attempt) for attempt in range(3)]
    ended.remember(keys[0], "")
    ended.remember(keys[1], "torn")
    ended.remember(keys[0], "")
    ended.remember(keys[2], "")
    assert [ended.error_of(key) for key in keys] == ["", None, ""]
