"""The decode side of a handoff, case by case."""

from __future__ import annotations

import pytest

from kv_transfer.handoff.actions import (
    Begun,
    Complete,
    Failed,
    ReceiverAction,
    SendAbort,
    SendAsk,
    SendGrant,
    SendRenew,
    Unfence,
    Verify,
)
from kv_transfer.handoff.key import ClosedHandoffs, HandoffKey, IllegalMove
from kv_transfer.handoff.receiver import HandoffReceiver
from kv_transfer.handoff.states import ReceiverEvent, ReceiverState, receiver_transition
from protocol.messages import KvAsk, KvBegun, KvClosed, KvGrant, KvRenew, KvWritten

KEY = HandoffKey("r", 1)
P = "prefill"
BLOCKS = (7, 8, 9)
UNFENCE = Unfence(KEY, BLOCKS)


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
    receiver: HandoffReceiver, key: HandoffKey, peer: str, first_block: int, blocks: tuple[int, ...]
) -> list[ReceiverAction]:
    """All up to the grant, at time 0."""
    receiver.ask(key, peer, now=0)
    receiver.begun(KvBegun(request_id=key.request_id, attempt=key.attempt))
    return receiver.offer(key, first_block, blocks, now=0)


def closed(error: str = "") -> KvClosed:
    return KvClosed(request_id="r", attempt=1, error=error)


@pytest.fixture
def receiver() -> HandoffReceiver:
    return HandoffReceiver("decode", ttl_s=3.0, landing_s=2.0)


@pytest.fixture
def offered(receiver: HandoffReceiver) -> HandoffReceiver:
    """Blocks 2, 3 and 4 of the prompt are granted at time 0."""
    offer(receiver, KEY, P, 2, BLOCKS)
    return receiver


def test_an_ask_reserves_nothing_and_is_repeated_until_something_is_granted(
    receiver: HandoffReceiver,
) -> None:
    ask = SendAsk(P, KvAsk(request_id="r", attempt=1, agent="decode", ttl_ms=3000))
    assert receiver.ask(KEY, P, now=0) == [ask]
    assert (receiver.num_open, receiver.is_asking(KEY), receiver.is_known(KEY)) == (0, True, True)
    assert receiver.sweep(now=0.9) == []
    assert receiver.sweep(now=1.0) == [ask]
    assert receiver.begun(BEGUN) == [Begun(KEY)]
    assert receiver.begun(BEGUN) == []
    assert receiver.sweep(now=2.0) == [ask]
    receiver.offer(KEY, 2, BLOCKS, now=2.5)
    assert receiver.begun(BEGUN) == []
    assert receiver.sweep(now=3.0) == []
    assert receiver.ignored == 0


def test_asks_are_repeated_each_in_its_time(receiver: HandoffReceiver) -> None:
    keys = [HandoffKey(name, 1) for name in "abc"]
    for i, key in enumerate(keys):
        receiver.ask(key, P, now=0.1 * i)

    def asked(now: float) -> list[str]:
        swept = receiver.sweep(now)
        return [action.ask.request_id for action in swept if isinstance(action, SendAsk)]

    assert asked(1.05) == ["a"]
    assert asked(1.5) == ["b", "c"]
    assert asked(2.1) == ["a"]


def test_nothing_is_offered_before_the_source_has_begun(receiver: HandoffReceiver) -> None:
    with pytest.raises(IllegalMove, match="before its source has begun"):
        receiver.offer(KEY, 2, BLOCKS, now=0)
    receiver.ask(KEY, P, now=0)
    with pytest.raises(IllegalMove, match="before its source has begun"):
        receiver.offer(KEY, 2, BLOCKS, now=0)


@pytest.mark.parametrize("has_begun", [False, True])
def test_what_ends_an_ask_leaves_no_fence(has_begun: bool) -> None:
    ends = {
        "": lambda receiver: receiver.abort(KEY),
        "torn": lambda receiver: receiver.closed(closed("torn"), now=1),
        "the prefill worker closed before anything was granted": lambda receiver: receiver.closed(
            closed(), now=1
        ),
        "the prefill worker is gone": lambda receiver: receiver.agent_gone(P, now=1),
    }
    for reason, end in ends.items():
        receiver = HandoffReceiver("decode", ttl_s=3.0, landing_s=2.0)
        receiver.ask(KEY, P, now=0)
        if has_begun:
            receiver.begun(BEGUN)
        wanted = Failed(KEY, reason, ()) if reason else SendAbort(KEY, P)
        assert end(receiver) == [wanted]
        assert (receiver.num_open, receiver.is_asking(KEY)) == (0, False)
        assert receiver.sweep(now=100.0) == []
        assert receiver.begun(BEGUN) == []
        with pytest.raises(IllegalMove, match="twice"):
            receiver.ask(KEY, P, now=100.0)


def test_the_grant_says_where_and_how_long(receiver: HandoffReceiver) -> None:
    grant = KvGrant(
        request_id="r", attempt=1, agent="decode", first_block=2, block_ids=[7, 8, 9], ttl_ms=3000
    )
    assert offer(receiver, KEY, P, 2, BLOCKS) == [SendGrant(P, grant)]
    assert receiver.num_fenced_blocks == 3


def test_blocks_are_counted_not_messages(offered: HandoffReceiver) -> None:
    assert offered.written(written(4, 1)) == []
    assert offered.written(written(4, 1)) == []
    assert offered.written(written(3, 2)) == []
    assert offered.written(written(2, 1)) == [Complete(KEY), UNFENCE]
    assert offered.closed(closed(), now=1) == []
    assert (offered.num_open, offered.num_fenced_blocks, offered.ignored) == (0, 0, 0)


def test_nothing_to_send_is_complete_at_once(receiver: HandoffReceiver) -> None:
    grant, *rest = offer(receiver, KEY, P, 5, ())
    assert isinstance(grant, SendGrant)
    assert rest == [Complete(KEY), Unfence(KEY, ())]
    assert receiver.closed(closed(), now=1) == []
    assert receiver.ignored == 0


def test_a_wanted_grant_is_renewed_every_third_of_its_life(offered: HandoffReceiver) -> None:
    again = SendRenew(P, KvRenew(request_id="r", attempt=1, ttl_ms=3000))
    assert offered.sweep(now=0.9) == []
    assert offered.sweep(now=1.0) == [again]
    assert offered.sweep(now=1.5) == []
    assert offered.sweep(now=2.0) == [again]
    assert offered.sweep(now=1000.0) == [again]  # no timeout of ours lifts the fence


def test_an_abort_is_asked_for_until_it_is_answered(offered: HandoffReceiver) -> None:
    ask = SendAbort(KEY, P)
    assert offered.abort(KEY) == [ask]
    assert offered.abort(KEY) == []
    assert offered.sweep(now=1.0) == [ask]
    assert offered.sweep(now=1000.0) == [ask]
    assert offered.num_fenced_blocks == 3
    assert offered.closed(closed(), now=1001.0) == [UNFENCE]
    assert offered.ignored == 0


def test_an_abort_is_over_when_all_has_arrived_anyway(offered: HandoffReceiver) -> None:
    offered.abort(KEY)
    assert offered.written(written(2, 3)) == [UNFENCE]


def test_closing_with_an_error_fails_now_and_unfences_after_landing(
    offered: HandoffReceiver,
) -> None:
    offered.written(written(2, 1))
    assert offered.closed(closed("torn"), now=1.0) == [Failed(KEY, "torn", (2,))]
    assert offered.closed(closed("torn"), now=1.5) == []
    assert offered.abort(KEY) == []
    assert offered.sweep(now=2.9) == []
    assert offered.sweep(now=3.0) == [UNFENCE]


def test_closing_in_order_before_the_notifications(offered: HandoffReceiver) -> None:
    offered.written(written(2, 1))
    assert offered.closed(closed(), now=1.0) == []
    assert offered.sweep(now=1.1) == []
    assert offered.written(written(3, 2)) == [Complete(KEY), UNFENCE]


def test_closing_in_order_without_all_blocks_fails(offered: HandoffReceiver) -> None:
    offered.written(written(3, 1))
    offered.closed(closed(), now=1.0)
    reason = "the prefill worker closed before every block had arrived"
    assert offered.sweep(now=3.0) == [Failed(KEY, reason, (3,)), UNFENCE]


def test_aborting_what_closed_in_order_unfences_at_once(offered: HandoffReceiver) -> None:
    offered.closed(closed(), now=1.0)
    assert offered.abort(KEY) == [UNFENCE]


def test_a_dead_peer_fails_its_handoffs_and_keeps_what_arrived(offered: HandoffReceiver) -> None:
    offer(offered, HandoffKey("s", 1), "other", 0, (1,))
    offered.written(written(2, 2))
    gone = "the prefill worker is gone"
    assert offered.agent_gone(P, now=5.0) == [Failed(KEY, gone, (2, 3))]
    assert offered.agent_gone(P, now=6.0) == []
    assert UNFENCE not in offered.sweep(now=6.9)
    assert UNFENCE in offered.sweep(now=7.0)
    assert offered.num_open == 1


def test_a_peer_that_dies_while_aborting(offered: HandoffReceiver) -> None:
    offered.abort(KEY)
    assert offered.agent_gone(P, now=5.0) == []
    assert offered.sweep(now=7.0) == [UNFENCE]


@pytest.mark.parametrize(
    "strange", [written(1, 1), written(4, 2), written(5, 1), written(2, 0), written(2, 1, b"x")]
)
def test_blocks_that_were_not_granted_fail_the_attempt(
    offered: HandoffReceiver, strange: KvWritten
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
    receiver = HandoffReceiver("decode", ttl_s=3.0, landing_s=2.0, checksum=True)
    offer(receiver, KEY, P, 2, BLOCKS)
    receiver.written(written(4, 1, b"e"))
    assert receiver.written(written(2, 2, b"c", b"d")) == [Verify(KEY, BLOCKS, (b"c", b"d", b"e"))]
    assert receiver.sweep(now=100.0) == []
    assert receiver.agent_gone(P, now=100.0) == []
    assert receiver.verified(KEY, ok=True) == [Complete(KEY), UNFENCE]
    assert receiver.verified(KEY, ok=True) == []
    assert receiver.ignored == 1


def test_a_wrong_digest_fails_the_attempt_and_counts_nothing_as_arrived() -> None:
    receiver = HandoffReceiver("decode", ttl_s=3.0, landing_s=2.0, checksum=True)
    offer(receiver, KEY, P, 2, BLOCKS)
    receiver.written(written(2, 3, b"c", b"d", b"e"))
    assert receiver.verified(KEY, ok=False) == [
        Failed(KEY, "the digest of a block differs", ()),
        UNFENCE,
    ]


def test_aborting_while_verifying_unfences() -> None:
    receiver = HandoffReceiver("decode", ttl_s=3.0, landing_s=2.0, checksum=True)
    offer(receiver, KEY, P, 2, BLOCKS)
    receiver.written(written(2, 3, b"c", b"d", b"e"))
    assert receiver.abort(KEY) == [UNFENCE]
    assert receiver.verified(KEY, ok=True) == []


def test_missing_digests_fail_the_attempt() -> None:
    receiver = HandoffReceiver("decode", ttl_s=3.0, landing_s=2.0, checksum=True)
    offer(receiver, KEY, P, 2, BLOCKS)
    failed, ask = receiver.written(written(2, 2, b"c"))
    assert isinstance(failed, Failed)
    assert ask == SendAbort(KEY, P)


def test_unverified_blocks_do_not_count_as_arrived() -> None:
    receiver = HandoffReceiver("decode", ttl_s=3.0, landing_s=2.0, checksum=True)
    offer(receiver, KEY, P, 2, BLOCKS)
    receiver.written(written(2, 1, b"c"))
    assert receiver.closed(closed("torn"), now=1.0) == [Failed(KEY, "torn", ())]


def test_what_arrives_for_unknown_handoffs_is_counted(receiver: HandoffReceiver) -> None:
    assert receiver.written(written(0, 1)) == []
    assert receiver.closed(closed(), now=0) == []
    assert receiver.abort(KEY) == []
    assert receiver.verified(KEY, ok=True) == []
    assert receiver.begun(BEGUN) == []
    assert receiver.ignored == 5


def test_a_handoff_is_asked_for_once(offered: HandoffReceiver) -> None:
    with pytest.raises(IllegalMove, match="twice"):
        offered.ask(KEY, P, now=0)
    offered.written(written(2, 3))
    with pytest.raises(IllegalMove, match="twice"):
        offered.ask(KEY, P, now=0)


def test_an_ended_handoff_does_not_move() -> None:
    for event in ReceiverEvent:
        with pytest.raises(IllegalMove, match="when ended"):
            receiver_transition(ReceiverState.ENDED, event)
    with pytest.raises(IllegalMove):
        receiver_transition(ReceiverState.ABORTING, ReceiverEvent.EXPIRE)


def test_the_memory_of_closed_handoffs_is_bounded() -> None:
    ended = ClosedHandoffs(capacity=2)
    keys = [HandoffKey("r", attempt) for attempt in range(3)]
    ended.remember(keys[0], "")
    ended.remember(keys[1], "torn")
    ended.remember(keys[0], "")
    ended.remember(keys[2], "")
    assert [ended.error_of(key) for key in keys] == ["", None, ""]
