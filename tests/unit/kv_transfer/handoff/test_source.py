"""The prefill side of a handoff, case by case."""

from __future__ import annotations

import itertools

import pytest

from kv_transfer.handoff.actions import Close, PostWrite, Release, SendBegun, SourceAction
from kv_transfer.handoff.key import HandoffKey, IllegalMove
from kv_transfer.handoff.source import HandoffSource
from kv_transfer.handoff.states import SourceEvent, SourceState, source_transition
from protocol.handoff_messages import KvAsk, KvGrant, KvRenew, KvWritten

KEY = HandoffKey("r", 1)
D = "decode"


def ask(ttl_ms: int = 10_000, attempt: int = 1) -> KvAsk:
    return KvAsk(request_id="r", attempt=attempt, agent=D, ttl_ms=ttl_ms)


def begin(source: HandoffSource, num_blocks: int) -> None:
    """The prompt is here, asked for and begun at time 0."""
    assert source.open(KEY, num_blocks, now=0, grant_deadline=9) == []
    assert source.ask(ask(), now=0) == []
    assert source.begin(KEY, now=0) == [SendBegun(KEY, D)]


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


def writes(actions: list[SourceAction]) -> list[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    """(source, target, first block, chunk) of each; there must be nothing else."""
    assert all(isinstance(action, PostWrite) for action in actions)
    return [
        (action.source_blocks, action.target_blocks, action.first_block, action.chunk)
        for action in actions
        if isinstance(action, PostWrite)
    ]


@pytest.fixture
def source() -> HandoffSource:
    return HandoffSource(margin_s=1.0, max_write_blocks=4, unasked_s=6.0)


def test_blocks_leave_chunk_by_chunk_and_the_handoff_closes(source: HandoffSource) -> None:
    begin(source, 5)
    assert source.grant(grant(0, 10, 11, 12, 13, 14), now=0) == []
    first = source.blocks_ready(KEY, 0, [70, 71], chunk=0, now=1)
    assert writes(first) == [((70, 71), (10, 11), 0, 0)]
    second = source.blocks_ready(KEY, 2, [72, 73, 74], chunk=1, now=2)
    assert writes(second) == [((72, 73, 74), (12, 13, 14), 2, 1)]
    assert source.finish(KEY, now=2) == []
    assert source.num_outstanding == 2
    assert source.write_finished(second[0].write_id, None) == []
    assert source.write_finished(first[0].write_id, None) == [Close(KEY, D, ""), Release(KEY)]
    assert (source.num_open, source.num_outstanding, source.ignored) == (0, 0, 0)


def test_a_notification_names_the_blocks(source: HandoffSource) -> None:
    begin(source, 3)
    source.grant(grant(1, 10, 11), now=0)
    (write,) = source.blocks_ready(KEY, 0, [70, 71, 72], chunk=0, now=1)
    assert isinstance(write, PostWrite)
    assert write.notification([b"a", b"b"]) == KvWritten(
        request_id="r", attempt=1, first_block=1, num_blocks=2, digests=[b"a", b"b"]
    )


def test_an_ask_before_the_prompt_is_answered_when_it_has_begun(source: HandoffSource) -> None:
    assert source.ask(ask(), now=0) == []
    assert source.open(KEY, 2, now=1, grant_deadline=9) == []
    assert source.begin(KEY, now=1) == [SendBegun(KEY, D)]
    assert source.grant(grant(0, 10, 11), now=1) == []
    assert writes(source.blocks_ready(KEY, 0, [70, 71], 0, now=2)) == [((70, 71), (10, 11), 0, 0)]


def test_every_ask_is_answered_once_the_prompt_has_begun(source: HandoffSource) -> None:
    source.open(KEY, 2, now=0, grant_deadline=9)
    assert source.ask(ask(), now=0) == []
    assert source.ask(ask(), now=1) == []
    assert source.begin(KEY, now=2) == [SendBegun(KEY, D)]
    assert source.ask(ask(), now=3) == [SendBegun(KEY, D)]
    source.grant(grant(0, 10, 11), now=4)
    assert source.ask(ask(), now=4) == []
    assert source.ignored == 1


def test_a_late_ask_is_answered_at_once(source: HandoffSource) -> None:
    source.open(KEY, 2, now=0, grant_deadline=9)
    assert source.begin(KEY, now=0) == []
    source.blocks_ready(KEY, 0, [70, 71], 0, now=0)
    source.finish(KEY, now=0)
    assert source.ask(ask(), now=5.9) == [SendBegun(KEY, D)]
    assert source.sweep(now=6) == []
    assert writes(source.grant(grant(0, 10, 11), now=6)) == [((70, 71), (10, 11), 0, 0)]


def test_a_prompt_that_has_begun_and_that_nobody_asks_for_is_let_go(source: HandoffSource) -> None:
    source.open(KEY, 1, now=0, grant_deadline=99)
    assert source.sweep(now=50) == []
    assert source.begin(KEY, now=50) == []
    assert source.sweep(now=55.9) == []
    assert source.sweep(now=56) == [Release(KEY)]
    assert source.ask(ask(), now=57) == [Close(KEY, D, "no sink asked for it")]


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_decode_worker_that_asks_no_more_is_not_waited_for(
    source: HandoffSource, has_begun: bool
) -> None:
    source.open(KEY, 1, now=0, grant_deadline=99)
    if has_begun:
        source.begin(KEY, now=0)
    source.ask(ask(3000), now=0)
    source.ask(ask(3000), now=2)
    assert source.sweep(now=4.9) == []
    no_more = "the sink asks no more"
    assert source.sweep(now=5) == [Close(KEY, D, no_more), Release(KEY)]


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_grant_before_the_prompt_has_begun_is_refused(
    source: HandoffSource, is_asked: bool
) -> None:
    source.open(KEY, 1, now=0, grant_deadline=9)
    if is_asked:
        source.ask(ask(), now=0)
    too_early = "blocks were granted before the prompt had begun"
    assert source.grant(grant(0, 10), now=0) == [Close(KEY, D, too_early), Release(KEY)]


def test_a_grant_that_nobody_asked_for_is_refused(source: HandoffSource) -> None:
    assert source.grant(grant(0, 10), now=0) == [Close(KEY, D, "the handoff is not known")]


def test_blocks_ready_before_the_grant_wait_for_it(source: HandoffSource) -> None:
    begin(source, 3)
    assert source.blocks_ready(KEY, 0, [70, 71], chunk=-1, now=0) == []
    assert source.blocks_ready(KEY, 2, [72], chunk=0, now=0) == []
    assert source.finish(KEY, now=0) == []
    assert writes(source.grant(grant(0, 10, 11, 12), now=1)) == [((70, 71, 72), (10, 11, 12), 0, 0)]


def test_blocks_that_the_decode_worker_has_are_not_sent(source: HandoffSource) -> None:
    begin(source, 4)
    source.grant(grant(3, 13), now=0)
    assert source.blocks_ready(KEY, 0, [70, 71], 0, now=0) == []
    (write,) = source.blocks_ready(KEY, 2, [72, 73], 1, now=0)
    assert writes([write]) == [((73,), (13,), 3, 1)]


def test_a_grant_of_nothing_closes_after_the_prompt(source: HandoffSource) -> None:
    begin(source, 2)
    source.grant(grant(2), now=0)
    assert source.blocks_ready(KEY, 0, [70, 71], 0, now=0) == []
    assert source.finish(KEY, now=0) == [Close(KEY, D, ""), Release(KEY)]


def test_large_writes_are_split(source: HandoffSource) -> None:
    begin(source, 9)
    source.grant(grant(0, *range(9)), now=0)
    posted = source.blocks_ready(KEY, 0, list(range(70, 79)), 0, now=0)
    assert [len(write[0]) for write in writes(posted)] == [4, 4, 1]
    assert [write[2] for write in writes(posted)] == [0, 4, 8]


def test_nothing_is_posted_without_margin_until_renewed(source: HandoffSource) -> None:
    begin(source, 1)
    source.grant(grant(0, 10, ttl_ms=3000), now=0)
    assert source.blocks_ready(KEY, 0, [70], 0, now=2.5) == []
    assert source.sweep(now=2.9) == []
    assert writes(source.renew(renew(), D, now=2.9)) == [((70,), (10,), 0, 0)]


def test_an_expired_grant_ends_the_handoff(source: HandoffSource) -> None:
    begin(source, 2)
    source.grant(grant(0, 10, 11, ttl_ms=3000), now=0)
    (write,) = source.blocks_ready(KEY, 0, [70], 0, now=0)
    assert isinstance(write, PostWrite)
    assert source.sweep(now=3.0) == []  # a write is outstanding
    assert source.renew(renew(), D, now=3.1) == []
    assert source.blocks_ready(KEY, 1, [71], 1, now=3.1) == []
    assert source.finish(KEY, now=3.1) == []
    assert source.write_finished(write.write_id, None) == [
        Close(KEY, D, "the grant expired"),
        Release(KEY),
    ]


def test_an_early_ask_waits_for_its_prompt_no_longer_than_it_was_to_live(
    source: HandoffSource,
) -> None:
    source.ask(ask(3000), now=0)
    assert source.ask(ask(3000), now=2) == []
    assert source.sweep(now=2.9) == []
    assert source.sweep(now=3) == [Close(KEY, D, "no prompt came in time")]
    assert source.open(KEY, 1, now=6, grant_deadline=9) == [Release(KEY)]
    assert source.num_open == 0


def test_an_ask_renewed_before_the_prompt_counts_after_it(source: HandoffSource) -> None:
    source.ask(ask(3000), now=0)
    assert source.ask(ask(3000), now=2) == []
    assert source.open(KEY, 1, now=2.9, grant_deadline=9) == []
    assert source.sweep(now=4.9) == []
    assert source.sweep(now=5) == [Close(KEY, D, "the sink asks no more"), Release(KEY)]


def test_a_prompt_that_nobody_grants_is_let_go(source: HandoffSource) -> None:
    begin(source, 1)
    assert source.sweep(now=8.9) == []
    assert source.sweep(now=9) == [Close(KEY, D, "no grant came in time"), Release(KEY)]
    assert source.grant(grant(0, 10), now=10) == [Close(KEY, D, "no grant came in time")]
    assert source.ignored == 1


def test_abort_waits_for_outstanding_writes(source: HandoffSource) -> None:
    begin(source, 2)
    source.grant(grant(0, 10, 11), now=0)
    (write,) = source.blocks_ready(KEY, 0, [70], 0, now=0)
    assert isinstance(write, PostWrite)
    assert source.abort(KEY, agent=D) == []
    assert source.abort(KEY, agent=D) == []
    assert source.blocks_ready(KEY, 1, [71], 1, now=0) == []
    assert source.write_finished(write.write_id, None) == [Close(KEY, D, ""), Release(KEY)]
    assert source.abort(KEY, agent=D) == [Close(KEY, D, "")]


def test_a_failed_write_while_draining_is_told(source: HandoffSource) -> None:
    begin(source, 1)
    source.grant(grant(0, 10), now=0)
    (write,) = source.blocks_ready(KEY, 0, [70], 0, now=0)
    assert isinstance(write, PostWrite)
    assert source.finish(KEY, now=0) == []
    assert source.write_finished(write.write_id, "torn") == [Close(KEY, D, "torn"), Release(KEY)]
    assert source.grant(grant(0, 10), now=1) == [Close(KEY, D, "torn")]


def test_a_failed_write_stops_the_others(source: HandoffSource) -> None:
    begin(source, 3)
    source.grant(grant(0, 10, 11, 12), now=0)
    (one,) = source.blocks_ready(KEY, 0, [70], 0, now=0)
    (two,) = source.blocks_ready(KEY, 1, [71], 1, now=0)
    assert isinstance(one, PostWrite)
    assert isinstance(two, PostWrite)
    assert source.write_finished(one.write_id, "torn") == []
    assert source.blocks_ready(KEY, 2, [72], 2, now=0) == []
    assert source.write_finished(two.write_id, "too") == [Close(KEY, D, "torn"), Release(KEY)]


def test_an_abort_before_everything_answers_the_grant(source: HandoffSource) -> None:
    assert source.abort(KEY) == []
    assert source.grant(grant(0, 10), now=0) == [Close(KEY, D, "")]
    assert source.open(KEY, 1, now=0, grant_deadline=9) == [Release(KEY)]
    assert source.ignored == 3


def test_a_decode_worker_that_asks_about_the_unknown_is_answered(source: HandoffSource) -> None:
    assert source.abort(KEY, agent=D) == [Close(KEY, D, "")]
    other = KvRenew(request_id="s", attempt=2, ttl_ms=1)
    assert source.renew(other, D, now=0) == [
        Close(HandoffKey("s", 2), D, "the handoff is not known")
    ]


def test_a_renewal_without_its_grant_fails_the_attempt(source: HandoffSource) -> None:
    source.open(KEY, 1, now=0, grant_deadline=9)
    assert source.renew(renew(), D, now=1) == [
        Close(KEY, D, "the grant was lost on its way"),
        Release(KEY),
    ]


def test_an_ask_for_an_older_attempt_is_closed(source: HandoffSource) -> None:
    newer = HandoffKey("r", 2)
    source.open(newer, 1, now=0, grant_deadline=9)
    assert source.ask(ask(), now=0) == [Close(KEY, D, "a newer attempt is open")]
    assert source.ignored == 1
    assert source.is_open(newer)


def test_a_repeated_grant_changes_nothing(source: HandoffSource) -> None:
    begin(source, 2)
    source.grant(grant(0, 10, 11), now=0)
    source.blocks_ready(KEY, 0, [70], 0, now=0)
    assert source.grant(grant(0, 20, 21), now=0) == []
    assert source.ignored == 1
    assert writes(source.blocks_ready(KEY, 1, [71], 1, now=0)) == [((71,), (11,), 1, 1)]


@pytest.mark.parametrize(
    ("offered", "error"),
    [
        (grant(1, 10, 11), "the grant ends at block 3, the prompt at 2"),
        (grant(0, 10, 10), "the grant is malformed"),
        (grant(-1, 10, 11), "the grant is malformed"),
    ],
)
def test_grants_that_cannot_be_meant_are_refused(
    source: HandoffSource, offered: KvGrant, error: str
) -> None:
    begin(source, 2)
    assert source.grant(offered, now=0) == [Close(KEY, D, error), Release(KEY)]
    assert source.num_open == 0


def test_a_lost_decode_worker_ends_its_handoffs_only(source: HandoffSource) -> None:
    other = HandoffKey("other", 1)
    begin(source, 1)
    source.grant(grant(0, 10), now=0)
    source.open(other, 1, now=0, grant_deadline=9)
    assert source.peer_lost(D) == [
        Close(KEY, D, "the sink cannot be reached"),
        Release(KEY),
    ]
    assert source.is_open(other)


def test_what_the_owner_gets_wrong_raises(source: HandoffSource) -> None:
    source.open(KEY, 2, now=0, grant_deadline=9)
    with pytest.raises(IllegalMove):
        source.open(KEY, 2, now=0, grant_deadline=9)
    source.ask(ask(attempt=2), now=0)
    with pytest.raises(IllegalMove, match="before it is open"):
        source.begin(HandoffKey("r", 2), now=0)
    with pytest.raises(ValueError, match="follow 0"):
        source.blocks_ready(KEY, 1, [71], 0, now=0)
    with pytest.raises(ValueError, match="of 2"):
        source.blocks_ready(KEY, 0, [70, 71, 72], 0, now=0)
    with pytest.raises(ValueError, match="0 blocks of 2"):
        source.finish(KEY, now=0)


def test_events_for_unknown_handoffs_are_counted(source: HandoffSource) -> None:
    assert source.blocks_ready(KEY, 0, [70], 0, now=0) == []
    assert source.begin(KEY, now=0) == []
    assert source.finish(KEY, now=0) == []
    assert source.write_finished(77, None) == []
    assert source.ignored == 4


def test_only_the_listed_moves_exist() -> None:
    legal = 0
    for state, event in itertools.product(SourceState, SourceEvent):
        try:
            source_transition(state, event)
            legal += 1
        except IllegalMove:
            continue
    assert legal == 8
    with pytest.raises(IllegalMove, match="cannot grant when draining"):
        source_transition(SourceState.DRAINING, SourceEvent.GRANT)


def test_a_failed_write_ends_what_was_granted_and_not_what_was_only_asked_for(
    source: HandoffSource,
) -> None:
    begin(source, 1)
    source.grant(grant(0, 10), now=0)
    asked = HandoffKey("asked", 1)
    source.open(asked, 1, now=0, grant_deadline=9)
    source.ask(KvAsk(request_id="asked", attempt=1, agent=D, ttl_ms=10_000), now=0)
    unreachable = "the sink cannot be reached"
    assert source.pool_lost(D) == [Close(KEY, D, unreachable), Release(KEY)]
    assert source.begin(asked, now=1) == [SendBegun(asked, D)], "it goes on"
    assert source.peer_lost(D) == [Close(asked, D, unreachable), Release(asked)]


def test_a_prompt_that_has_begun_and_is_asked_for_waits_for_its_grant(
    source: HandoffSource,
) -> None:
    assert not source.waits_for_grant
    source.open(KEY, 1, now=0, grant_deadline=9)
    source.ask(ask(), now=0)
    assert not source.waits_for_grant, "it has not begun"
    source.begin(KEY, now=0)
    assert source.waits_for_grant
    source.grant(grant(0, 10), now=0)
    assert not source.waits_for_grant
