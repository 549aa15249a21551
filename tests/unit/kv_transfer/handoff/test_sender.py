"""The prefill side of a handoff, case by case."""

from __future__ import annotations

import itertools

import pytest

from kv_transfer.handoff.actions import Close, PostWrite, Release, SendBegun, SenderAction
from kv_transfer.handoff.key import HandoffKey, IllegalMove
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.handoff.states import SenderEvent, SenderState, sender_transition
from protocol.messages import KvAsk, KvGrant, KvRenew, KvWritten

KEY = HandoffKey("r", 1)
D = "decode"


def ask(ttl_ms: int = 10_000, attempt: int = 1) -> KvAsk:
    return KvAsk(request_id="r", attempt=attempt, agent=D, ttl_ms=ttl_ms)


def begin(sender: HandoffSender, num_blocks: int) -> None:
    """The prompt is here, asked for and begun at time 0."""
    assert sender.open(KEY, num_blocks, now=0, grant_deadline=9) == []
    assert sender.ask(ask(), now=0) == []
    assert sender.begin(KEY, now=0) == [SendBegun(KEY, D)]


def grant(first_block: int, *block_ids: int, ttl_ms: int = 10_000, attempt: int = 1) -> KvGrant:
    return KvGrant(
        request_id="r",
        attempt=attempt,
        agent=D,
        first_block=first_block,
        block_ids=list(block_ids),
        ttl_ms=ttl_ms,
    )


def renew(ttl_ms: int = 10_000) -> KvRenew:
    return KvRenew(request_id="r", attempt=1, ttl_ms=ttl_ms)


def writes(actions: list[SenderAction]) -> list[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    """(source, target, first block, chunk) of each; there must be nothing else."""
    assert all(isinstance(action, PostWrite) for action in actions)
    return [
        (action.source_blocks, action.target_blocks, action.first_block, action.chunk)
        for action in actions
        if isinstance(action, PostWrite)
    ]


@pytest.fixture
def sender() -> HandoffSender:
    return HandoffSender(margin_s=1.0, max_write_blocks=4, unasked_s=6.0)


def test_blocks_leave_chunk_by_chunk_and_the_handoff_closes(sender: HandoffSender) -> None:
    begin(sender, 5)
    assert sender.grant(grant(0, 10, 11, 12, 13, 14), now=0) == []
    first = sender.blocks_ready(KEY, 0, [70, 71], chunk=0, now=1)
    assert writes(first) == [((70, 71), (10, 11), 0, 0)]
    second = sender.blocks_ready(KEY, 2, [72, 73, 74], chunk=1, now=2)
    assert writes(second) == [((72, 73, 74), (12, 13, 14), 2, 1)]
    assert sender.finish(KEY, now=2) == []
    assert sender.num_outstanding == 2
    assert sender.write_finished(second[0].write_id, None) == []
    assert sender.write_finished(first[0].write_id, None) == [Close(KEY, D, ""), Release(KEY)]
    assert (sender.num_open, sender.num_outstanding, sender.ignored) == (0, 0, 0)


def test_a_notification_names_the_blocks(sender: HandoffSender) -> None:
    begin(sender, 3)
    sender.grant(grant(1, 10, 11), now=0)
    (write,) = sender.blocks_ready(KEY, 0, [70, 71, 72], chunk=0, now=1)
    assert isinstance(write, PostWrite)
    assert write.notification([b"a", b"b"]) == KvWritten(
        request_id="r", attempt=1, first_block=1, num_blocks=2, digests=[b"a", b"b"]
    )


def test_an_ask_before_the_prompt_is_answered_when_it_has_begun(sender: HandoffSender) -> None:
    assert sender.ask(ask(), now=0) == []
    assert sender.open(KEY, 2, now=1, grant_deadline=9) == []
    assert sender.begin(KEY, now=1) == [SendBegun(KEY, D)]
    assert sender.grant(grant(0, 10, 11), now=1) == []
    assert writes(sender.blocks_ready(KEY, 0, [70, 71], 0, now=2)) == [((70, 71), (10, 11), 0, 0)]


def test_every_ask_is_answered_once_the_prompt_has_begun(sender: HandoffSender) -> None:
    sender.open(KEY, 2, now=0, grant_deadline=9)
    assert sender.ask(ask(), now=0) == []
    assert sender.ask(ask(), now=1) == []
    assert sender.begin(KEY, now=2) == [SendBegun(KEY, D)]
    assert sender.ask(ask(), now=3) == [SendBegun(KEY, D)]
    sender.grant(grant(0, 10, 11), now=4)
    assert sender.ask(ask(), now=4) == []
    assert sender.ignored == 1


def test_a_late_ask_is_answered_at_once(sender: HandoffSender) -> None:
    sender.open(KEY, 2, now=0, grant_deadline=9)
    assert sender.begin(KEY, now=0) == []
    sender.blocks_ready(KEY, 0, [70, 71], 0, now=0)
    sender.finish(KEY, now=0)
    assert sender.ask(ask(), now=5.9) == [SendBegun(KEY, D)]
    assert sender.sweep(now=6) == []
    assert writes(sender.grant(grant(0, 10, 11), now=6)) == [((70, 71), (10, 11), 0, 0)]


def test_a_prompt_that_has_begun_and_that_nobody_asks_for_is_let_go(sender: HandoffSender) -> None:
    sender.open(KEY, 1, now=0, grant_deadline=99)
    assert sender.sweep(now=50) == []
    assert sender.begin(KEY, now=50) == []
    assert sender.sweep(now=55.9) == []
    assert sender.sweep(now=56) == [Release(KEY)]
    assert sender.ask(ask(), now=57) == [Close(KEY, D, "no decode worker asked for it")]


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_decode_worker_that_asks_no_more_is_not_waited_for(
    sender: HandoffSender, has_begun: bool
) -> None:
    sender.open(KEY, 1, now=0, grant_deadline=99)
    if has_begun:
        sender.begin(KEY, now=0)
    sender.ask(ask(3000), now=0)
    sender.ask(ask(3000), now=2)
    assert sender.sweep(now=4.9) == []
    no_more = "the decode worker asks no more"
    assert sender.sweep(now=5) == [Close(KEY, D, no_more), Release(KEY)]


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_grant_before_the_prompt_has_begun_is_refused(
    sender: HandoffSender, is_asked: bool
) -> None:
    sender.open(KEY, 1, now=0, grant_deadline=9)
    if is_asked:
        sender.ask(ask(), now=0)
    too_early = "blocks were granted before the prompt had begun"
    assert sender.grant(grant(0, 10), now=0) == [Close(KEY, D, too_early), Release(KEY)]


def test_a_grant_that_nobody_asked_for_is_refused(sender: HandoffSender) -> None:
    assert sender.grant(grant(0, 10), now=0) == [Close(KEY, D, "the handoff is not known")]


def test_blocks_ready_before_the_grant_wait_for_it(sender: HandoffSender) -> None:
    begin(sender, 3)
    assert sender.blocks_ready(KEY, 0, [70, 71], chunk=-1, now=0) == []
    assert sender.blocks_ready(KEY, 2, [72], chunk=0, now=0) == []
    assert sender.finish(KEY, now=0) == []
    assert writes(sender.grant(grant(0, 10, 11, 12), now=1)) == [((70, 71, 72), (10, 11, 12), 0, 0)]


def test_blocks_that_the_decode_worker_has_are_not_sent(sender: HandoffSender) -> None:
    begin(sender, 4)
    sender.grant(grant(3, 13), now=0)
    assert sender.blocks_ready(KEY, 0, [70, 71], 0, now=0) == []
    (write,) = sender.blocks_ready(KEY, 2, [72, 73], 1, now=0)
    assert writes([write]) == [((73,), (13,), 3, 1)]


def test_a_grant_of_nothing_closes_after_the_prompt(sender: HandoffSender) -> None:
    begin(sender, 2)
    sender.grant(grant(2), now=0)
    assert sender.blocks_ready(KEY, 0, [70, 71], 0, now=0) == []
    assert sender.finish(KEY, now=0) == [Close(KEY, D, ""), Release(KEY)]


def test_large_writes_are_split(sender: HandoffSender) -> None:
    begin(sender, 9)
    sender.grant(grant(0, *range(9)), now=0)
    posted = sender.blocks_ready(KEY, 0, list(range(70, 79)), 0, now=0)
    assert [len(write[0]) for write in writes(posted)] == [4, 4, 1]
    assert [write[2] for write in writes(posted)] == [0, 4, 8]


def test_nothing_is_posted_without_margin_until_renewed(sender: HandoffSender) -> None:
    begin(sender, 1)
    sender.grant(grant(0, 10, ttl_ms=3000), now=0)
    assert sender.blocks_ready(KEY, 0, [70], 0, now=2.5) == []
    assert sender.sweep(now=2.9) == []
    assert writes(sender.renew(renew(), D, now=2.9)) == [((70,), (10,), 0, 0)]


def test_an_expired_grant_ends_the_handoff(sender: HandoffSender) -> None:
    begin(sender, 2)
    sender.grant(grant(0, 10, 11, ttl_ms=3000), now=0)
    (write,) = sender.blocks_ready(KEY, 0, [70], 0, now=0)
    assert isinstance(write, PostWrite)
    assert sender.sweep(now=3.0) == []  # a write is outstanding
    assert sender.renew(renew(), D, now=3.1) == []
    assert sender.blocks_ready(KEY, 1, [71], 1, now=3.1) == []
    assert sender.finish(KEY, now=3.1) == []
    assert sender.write_finished(write.write_id, None) == [
        Close(KEY, D, "the grant expired"),
        Release(KEY),
    ]


def test_an_early_ask_waits_for_its_prompt_no_longer_than_it_was_to_live(
    sender: HandoffSender,
) -> None:
    sender.ask(ask(3000), now=0)
    assert sender.ask(ask(3000), now=2) == []
    assert sender.sweep(now=2.9) == []
    assert sender.sweep(now=3) == [Close(KEY, D, "no prompt came in time")]
    assert sender.open(KEY, 1, now=6, grant_deadline=9) == [Release(KEY)]
    assert sender.num_open == 0


def test_an_ask_renewed_before_the_prompt_counts_after_it(sender: HandoffSender) -> None:
    sender.ask(ask(3000), now=0)
    assert sender.ask(ask(3000), now=2) == []
    assert sender.open(KEY, 1, now=2.9, grant_deadline=9) == []
    assert sender.sweep(now=4.9) == []
    assert sender.sweep(now=5) == [Close(KEY, D, "the decode worker asks no more"), Release(KEY)]


def test_a_prompt_that_nobody_grants_is_let_go(sender: HandoffSender) -> None:
    begin(sender, 1)
    assert sender.sweep(now=8.9) == []
    assert sender.sweep(now=9) == [Close(KEY, D, "no grant came in time"), Release(KEY)]
    assert sender.grant(grant(0, 10), now=10) == [Close(KEY, D, "no grant came in time")]
    assert sender.ignored == 1


def test_abort_waits_for_outstanding_writes(sender: HandoffSender) -> None:
    begin(sender, 2)
    sender.grant(grant(0, 10, 11), now=0)
    (write,) = sender.blocks_ready(KEY, 0, [70], 0, now=0)
    assert isinstance(write, PostWrite)
    assert sender.abort(KEY, agent=D) == []
    assert sender.abort(KEY, agent=D) == []
    assert sender.blocks_ready(KEY, 1, [71], 1, now=0) == []
    assert sender.write_finished(write.write_id, None) == [Close(KEY, D, ""), Release(KEY)]
    assert sender.abort(KEY, agent=D) == [Close(KEY, D, "")]


def test_a_failed_write_while_draining_is_told(sender: HandoffSender) -> None:
    begin(sender, 1)
    sender.grant(grant(0, 10), now=0)
    (write,) = sender.blocks_ready(KEY, 0, [70], 0, now=0)
    assert isinstance(write, PostWrite)
    assert sender.finish(KEY, now=0) == []
    assert sender.write_finished(write.write_id, "torn") == [Close(KEY, D, "torn"), Release(KEY)]
    assert sender.grant(grant(0, 10), now=1) == [Close(KEY, D, "torn")]


def test_a_failed_write_stops_the_others(sender: HandoffSender) -> None:
    begin(sender, 3)
    sender.grant(grant(0, 10, 11, 12), now=0)
    (one,) = sender.blocks_ready(KEY, 0, [70], 0, now=0)
    (two,) = sender.blocks_ready(KEY, 1, [71], 1, now=0)
    assert isinstance(one, PostWrite)
    assert isinstance(two, PostWrite)
    assert sender.write_finished(one.write_id, "torn") == []
    assert sender.blocks_ready(KEY, 2, [72], 2, now=0) == []
    assert sender.write_finished(two.write_id, "too") == [Close(KEY, D, "torn"), Release(KEY)]


def test_an_abort_before_everything_answers_the_grant(sender: HandoffSender) -> None:
    assert sender.abort(KEY) == []
    assert sender.grant(grant(0, 10), now=0) == [Close(KEY, D, "")]
    assert sender.open(KEY, 1, now=0, grant_deadline=9) == [Release(KEY)]
    assert sender.ignored == 3


def test_a_decode_worker_that_asks_about_the_unknown_is_answered(sender: HandoffSender) -> None:
    assert sender.abort(KEY, agent=D) == [Close(KEY, D, "")]
    other = KvRenew(request_id="s", attempt=2, ttl_ms=1)
    assert sender.renew(other, D, now=0) == [
        Close(HandoffKey("s", 2), D, "the handoff is not known")
    ]


def test_a_renewal_without_its_grant_fails_the_attempt(sender: HandoffSender) -> None:
    sender.open(KEY, 1, now=0, grant_deadline=9)
    assert sender.renew(renew(), D, now=1) == [
        Close(KEY, D, "the grant was lost on its way"),
        Release(KEY),
    ]


def test_an_ask_for_an_older_attempt_is_closed(sender: HandoffSender) -> None:
    newer = HandoffKey("r", 2)
    sender.open(newer, 1, now=0, grant_deadline=9)
    assert sender.ask(ask(), now=0) == [Close(KEY, D, "a newer attempt is open")]
    assert sender.ignored == 1
    assert sender.is_open(newer)


def test_a_repeated_grant_changes_nothing(sender: HandoffSender) -> None:
    begin(sender, 2)
    sender.grant(grant(0, 10, 11), now=0)
    sender.blocks_ready(KEY, 0, [70], 0, now=0)
    assert sender.grant(grant(0, 20, 21), now=0) == []
    assert sender.ignored == 1
    assert writes(sender.blocks_ready(KEY, 1, [71], 1, now=0)) == [((71,), (11,), 1, 1)]


@pytest.mark.parametrize(
    ("offered", "error"),
    [
        (grant(1, 10, 11), "the grant ends at block 3, the prompt at 2"),
        (grant(0, 10, 10), "the grant is malformed"),
        (grant(-1, 10, 11), "the grant is malformed"),
    ],
)
def test_grants_that_cannot_be_meant_are_refused(
    sender: HandoffSender, offered: KvGrant, error: str
) -> None:
    begin(sender, 2)
    assert sender.grant(offered, now=0) == [Close(KEY, D, error), Release(KEY)]
    assert sender.num_open == 0


def test_a_lost_decode_worker_ends_its_handoffs_only(sender: HandoffSender) -> None:
    other = HandoffKey("other", 1)
    begin(sender, 1)
    sender.grant(grant(0, 10), now=0)
    sender.open(other, 1, now=0, grant_deadline=9)
    assert sender.peer_lost(D) == [
        Close(KEY, D, "the decode worker cannot be reached"),
        Release(KEY),
    ]
    assert sender.is_open(other)


def test_what_the_owner_gets_wrong_raises(sender: HandoffSender) -> None:
    sender.open(KEY, 2, now=0, grant_deadline=9)
    with pytest.raises(IllegalMove):
        sender.open(KEY, 2, now=0, grant_deadline=9)
    sender.ask(ask(attempt=2), now=0)
    with pytest.raises(IllegalMove, match="before it is open"):
        sender.begin(HandoffKey("r", 2), now=0)
    with pytest.raises(ValueError, match="follow 0"):
        sender.blocks_ready(KEY, 1, [71], 0, now=0)
    with pytest.raises(ValueError, match="of 2"):
        sender.blocks_ready(KEY, 0, [70, 71, 72], 0, now=0)
    with pytest.raises(ValueError, match="0 blocks of 2"):
        sender.finish(KEY, now=0)


def test_events_for_unknown_handoffs_are_counted(sender: HandoffSender) -> None:
    assert sender.blocks_ready(KEY, 0, [70], 0, now=0) == []
    assert sender.begin(KEY, now=0) == []
    assert sender.finish(KEY, now=0) == []
    assert sender.write_finished(77, None) == []
    assert sender.ignored == 4


def test_only_the_listed_moves_exist() -> None:
    legal = 0
    for state, event in itertools.product(SenderState, SenderEvent):
        try:
            sender_transition(state, event)
            legal += 1
        except IllegalMove:
            continue
    assert legal == 8
    with pytest.raises(IllegalMove, match="cannot grant when draining"):
        sender_transition(SenderState.DRAINING, SenderEvent.GRANT)


def test_a_failed_write_ends_what_was_granted_and_not_what_was_only_asked_for(
    sender: HandoffSender,
) -> None:
    begin(sender, 1)
    sender.grant(grant(0, 10), now=0)
    asked = HandoffKey("asked", 1)
    sender.open(asked, 1, now=0, grant_deadline=9)
    sender.ask(KvAsk(request_id="asked", attempt=1, agent=D, ttl_ms=10_000), now=0)
    unreachable = "the decode worker cannot be reached"
    assert sender.pool_lost(D) == [Close(KEY, D, unreachable), Release(KEY)]
    assert sender.begin(asked, now=1) == [SendBegun(asked, D)], "it goes on"
    assert sender.peer_lost(D) == [Close(asked, D, unreachable), Release(asked)]


def test_a_prompt_that_has_begun_and_is_asked_for_waits_for_its_grant(
    sender: HandoffSender,
) -> None:
    assert not sender.waits_for_grant
    sender.open(KEY, 1, now=0, grant_deadline=9)
    sender.ask(ask(), now=0)
    assert not sender.waits_for_grant, "it has not begun"
    sender.begin(KEY, now=0)
    assert sender.waits_for_grant
    sender.grant(grant(0, 10), now=0)
    assert not sender.waits_for_grant
