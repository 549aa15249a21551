"""A prefill worker streams its blocks out, answers everybody, and keeps no block too long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from engine.runner import RowFailure
from kv_transfer.transfer_loop import PeerFailed
from protocol.messages import (
    Abort,
    AttemptFailed,
    FirstToken,
    HandoffToken,
    KvClosed,
    KvGrant,
    KvRenew,
    Prefill,
    PrefillDone,
    Role,
)
from protocol.registration import WorkerState
from runtime.control import Peer
from runtime.counters import Count
from tests.sequences import greedy
from tests.unit import fake_model
from tests.unit.fake_model import continuation, ranks_told
from tests.unit.worker_harness import ROUTER, Clock, DecodeBench, Lapsed, PrefillBench, finish

PROMPT = list(range(18))
PREFILL = Prefill(
    request_id="r", attempt=1, token_ids=PROMPT, num_output=0, sampling=greedy(4), deadline_ms=9000
)


@pytest.fixture
def d() -> Iterator[DecodeBench]:
    bench = DecodeBench("d", Clock())
    yield bench
    bench.close()


@pytest.fixture
def p() -> Iterator[PrefillBench]:
    bench = PrefillBench("p", Clock())
    yield bench
    assert bench.scheduler.sequences == []
    assert bench.scheduler.blocks.num_pinned == 0, "blocks were left behind"
    assert bench.sender.num_open == bench.sender.num_outstanding == 0
    bench.scheduler.blocks.check()
    bench.close()


def grant(d: DecodeBench, num_blocks: int = 5, **changes: Any) -> KvGrant:
    message = KvGrant(
        request_id="r",
        attempt=1,
        agent=d.transfers.agent,
        first_block=0,
        block_ids=list(range(num_blocks)),
        ttl_ms=3000,
    )
    return msgspec.structs.replace(message, **changes)


def say(p: PrefillBench, *messages: Any, turns: int = 1) -> list[Any]:
    p.server.inbox += [(ROUTER, message) for message in messages]
    for _ in range(turns):
        p.worker.turn()
    return p.take_sent()


def say_of_d(p: PrefillBench, d: DecodeBench, *messages: Any, turns: int = 1) -> list[Any]:
    p.server.inbox += [(d.as_peer, message) for message in messages]
    return say(p, turns=turns)


def finish_writes(p: PrefillBench) -> None:
    for write in list(p.transfers.writes):
        finish(write, p)


def types(messages: list[Any]) -> list[type]:
    return [type(message) for message in messages]


def test_blocks_leave_before_the_prompt_is_through(p: PrefillBench, d: DecodeBench) -> None:
    say(p, PREFILL)
    say_of_d(p, d, d.descriptor, grant(d))
    assert [write.source_blocks for write in p.transfers.writes] == [(0, 1), (2, 3)]
    sent = say(p)
    assert types(sent) == [FirstToken, HandoffToken]
    assert sent[0].token_id == continuation(PROMPT, 1)[0]
    finish_writes(p)
    assert types(say(p)) == [KvClosed, PrefillDone]
    assert p.counter(Count.BLOCKS_SENT) == 5


class UnpassedFence:
    """A card that computes until somebody waits for it."""

    def __init__(self) -> None:
        self.has_passed = False

    def is_done(self) -> bool:
        return self.has_passed

    def wait(self) -> None:
        self.has_passed = True


def test_on_a_card_blocks_are_given_to_the_transfer_thread_with_the_fence_behind_them(
    p: PrefillBench, d: DecodeBench
) -> None:
    p.model.fence = first = UnpassedFence()
    say(p, PREFILL)
    p.model.fence = second = UnpassedFence()
    say_of_d(p, d, d.descriptor, grant(d))
    assert p.transfers.fences == [first, second], "each behind the step that computed its blocks"
    assert (first.has_passed, second.has_passed) == (True, False), "nobody waits for the second"
    say(p)
    assert second.has_passed, "its successor was launched, and gave a token"
    finish_writes(p)
    assert types(say(p)) == [KvClosed, PrefillDone]


def test_what_is_told_of_the_prompt_goes_with_the_first_token_to_both(
    p: PrefillBench, d: DecodeBench
) -> None:
    sampling = msgspec.structs.replace(PREFILL.sampling, prompt_logprobs=0)
    warm, scored = PREFILL, msgspec.structs.replace(PREFILL, sampling=sampling, attempt=2)
    say(p, warm, turns=3)
    say(p, Abort(request_id="r", attempt=1))
    say(p, scored)
    say_of_d(p, d, d.descriptor, grant(d, attempt=2))
    sent = say(p)
    assert types(sent) == [FirstToken, HandoffToken]
    assert [ranks_told(each.prompt_logprobs) for each in sent] == [PROMPT[1:]] * 2
    assert sent[0].trace.cached_tokens == 0
    finish_writes(p)
    assert types(say(p)) == [KvClosed, PrefillDone]


def test_the_next_grant_adds_a_peer_again_that_the_transport_dropped(
    p: PrefillBench, d: DecodeBench
) -> None:
    say(p, PREFILL)
    say_of_d(p, d, d.descriptor, grant(d))
    p.transfers.remove_peer(d.transfers.agent)  # as the transfer loop does when a write fails
    p.transfers.events.append(PeerFailed(d.transfers.agent, "a write failed"))
    sent = say(p)
    assert AttemptFailed in types(sent)
    say(p, msgspec.structs.replace(PREFILL, attempt=2), turns=3)
    say_of_d(p, d, grant(d, attempt=2))
    assert d.transfers.agent in p.transfers.peers
    assert len(p.transfers.writes) == 3
    finish_writes(p)
    assert PrefillDone in types(say(p))


@pytest.mark.parametrize("loses_the_older", [False, True])
def test_two_connections_of_one_decode_worker_do_not_get_into_each_others_way(
    p: PrefillBench, d: DecodeBench, loses_the_older: bool
) -> None:
    """As when we are another incarnation: its connection to our former self still says who it is
    when the new one already has, and then goes."""
    former = Peer(b"former", d.name, Role.DECODE)
    say(p, PREFILL)
    say_of_d(p, d, d.descriptor)
    p.server.inbox.append((former, d.descriptor))
    say(p)
    if loses_the_older:
        p.server.gone.append(former)
        say(p)
        assert p.transfers.peers == {d.transfers.agent}
    p.server.sent.clear()
    p.server.inbox.append((d.as_peer, grant(d)))
    p.worker.turn()
    finish_writes(p)
    p.worker.turn()
    answers = [(peer, type(message)) for peer, message in p.server.sent if peer != ROUTER]
    assert answers == [(d.as_peer, HandoffToken), (d.as_peer, KvClosed)]


@pytest.mark.parametrize(
    "message_of", [grant, lambda d: KvRenew(request_id="r", attempt=1, ttl_ms=9)]
)
def test_a_decode_worker_that_is_not_known_is_told_also_while_the_handoff_is_open(
    p: PrefillBench, d: DecodeBench, message_of: Any
) -> None:
    say(p, PREFILL)
    sent = say_of_d(p, d, message_of(d))
    (closed,) = [message for message in sent if isinstance(message, KvClosed)]
    assert "not known" in closed.error
    say(p, Abort(request_id="r", attempt=1), turns=4)


@pytest.mark.parametrize("prompt_came", [False, True])
def test_a_decode_worker_that_comes_back_is_answered_over_the_connection_it_has(
    p: PrefillBench, d: DecodeBench, prompt_came: bool
) -> None:
    """What it granted ended when its connection did, and it has not heard of that."""
    former = Peer(b"former", d.name, Role.DECODE)
    p.server.inbox += [(former, d.descriptor), (former, grant(d))]
    say(p, *[PREFILL] * prompt_came)
    p.server.gone.append(former)
    say(p, turns=2)
    p.server.sent.clear()
    p.server.inbox += [(d.as_peer, d.descriptor), (d.as_peer, Abort(request_id="r", attempt=1))]
    p.worker.turn()
    assert [peer for peer, message in p.server.sent if type(message) is KvClosed] == [d.as_peer]


def answered(p: PrefillBench) -> list[tuple[Peer, type]]:
    """Who was told what since the last call, but for routers."""
    sent = [(peer, type(message)) for peer, message in p.server.sent if peer != ROUTER]
    p.server.sent.clear()
    return sent


def test_what_a_lost_connection_granted_goes_on_over_the_other(
    p: PrefillBench, d: DecodeBench
) -> None:
    former = Peer(b"former", d.name, Role.DECODE)
    say(p, PREFILL)
    p.server.inbox += [(former, d.descriptor), (former, grant(d)), (d.as_peer, d.descriptor)]
    p.server.gone.append(former)
    say(p)
    p.server.sent.clear()
    p.worker.turn()
    finish_writes(p)
    p.worker.turn()
    assert answered(p) == [(d.as_peer, HandoffToken), (d.as_peer, KvClosed)]


def test_who_asks_about_what_has_ended_is_answered_whichever_connection_is_newer(
    p: PrefillBench, d: DecodeBench
) -> None:
    former = Peer(b"former", d.name, Role.DECODE)
    p.server.inbox += [(d.as_peer, d.descriptor), (former, d.descriptor)]
    p.server.inbox += [(d.as_peer, Abort(request_id="r", attempt=1))]
    p.worker.turn()
    assert answered(p) == [(d.as_peer, KvClosed)]


def test_a_stranger_is_told_of_the_end_of_a_granted_handoff_not_before_its_writes_have_ended(
    p: PrefillBench, d: DecodeBench
) -> None:
    """A connection by which no pool was told speaks of what another one granted."""
    stranger = Peer(b"stranger", d.name, Role.DECODE)
    say(p, PREFILL)
    say_of_d(p, d, d.descriptor, grant(d))
    assert p.transfers.writes
    p.server.inbox.append((stranger, KvRenew(request_id="r", attempt=1, ttl_ms=3000)))
    say(p)
    p.server.sent.clear()
    p.worker.turn()
    assert answered(p) == [], "a write may still land"
    finish_writes(p)
    p.worker.turn()
    assert answered(p) == [(stranger, KvClosed)]


def test_of_what_has_ended_nothing_is_remembered_but_its_name(
    p: PrefillBench, d: DecodeBench
) -> None:
    say_of_d(p, d, d.descriptor)
    for number in range(3):
        late = grant(d, request_id=f"r{number}")
        renew = KvRenew(request_id=f"r{number}", attempt=1, ttl_ms=3000)
        sent = say_of_d(p, d, late, Abort(request_id=f"r{number}", attempt=1), renew, late)
        assert types(sent) == [KvClosed] * 3
    assert p.worker._outbound._speakers == {}


def test_a_decode_worker_that_was_lost_can_come_back(p: PrefillBench, d: DecodeBench) -> None:
    say_of_d(p, d, d.descriptor)
    p.server.gone.append(d.as_peer)
    say(p)
    assert p.transfers.peers == set()
    say_of_d(p, d, d.descriptor)
    assert p.transfers.peers == {d.transfers.agent}


@pytest.mark.parametrize(
    "message",
    [
        KvRenew(request_id="r", attempt=1, ttl_ms=3000),
        Abort(request_id="r", attempt=1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_decode_worker_whose_pool_was_refused_is_answered(
    p: PrefillBench, d: DecodeBench, message: Any
) -> None:
    forged = msgspec.structs.replace(d.descriptor, digest=b"wrong")
    (closed,) = say_of_d(p, d, forged, message)
    assert isinstance(closed, KvClosed)
    assert closed.error
    assert p.counter(Count.DESCRIPTORS_REFUSED) == 1
    (closed,) = say_of_d(p, d, grant(d))
    assert closed.error


def test_a_grant_for_another_workers_pool_is_not_followed(p: PrefillBench, d: DecodeBench) -> None:
    assert say_of_d(p, d, d.descriptor, grant(d, agent="somebody else's")) == []
    assert p.counter(Count.UNEXPECTED_MESSAGES) == 1


@pytest.mark.parametrize("how", ["done", "aborted"])
def test_an_attempt_that_was_here_is_not_begun_again(
    p: PrefillBench, d: DecodeBench, how: str
) -> None:
    say(p, PREFILL)
    if how == "aborted":
        say(p, Abort(request_id="r", attempt=1))
    else:
        say_of_d(p, d, d.descriptor, grant(d), turns=3)
        finish_writes(p)
        say(p)
    steps = p.counter(Count.STEPS)
    assert say(p, PREFILL, turns=3) == []
    assert p.counter(Count.STEPS) == steps
    assert p.counter(Count.STALE_MESSAGES) == 1


def test_a_newer_attempt_ends_the_older_one_and_not_the_other_way(p: PrefillBench) -> None:
    newer = msgspec.structs.replace(PREFILL, attempt=2)
    sent = say(p, PREFILL, newer, PREFILL, turns=4)
    assert [(type(m), m.attempt) for m in sent] == [(FirstToken, 2)]
    say(p, Abort(request_id="r", attempt=2))


def test_nothing_is_computed_for_a_decode_worker_that_gave_up(
    p: PrefillBench, d: DecodeBench
) -> None:
    say(p, PREFILL)
    say_of_d(p, d, d.descriptor, grant(d))
    steps = p.counter(Count.STEPS)
    say_of_d(p, d, Abort(request_id="r", attempt=1), turns=3)
    assert p.counter(Count.STEPS) == steps, "only its writes are waited for"
    finish_writes(p)
    assert types(say(p)) == [KvClosed, AttemptFailed]


@pytest.mark.parametrize("how", ["step raises", "row fails"])
def test_a_failed_step_ends_the_handoff_too(p: PrefillBench, d: DecodeBench, how: str) -> None:
    say_of_d(p, d, d.descriptor)
    p.model.explodes = "launch" if how == "step raises" else None
    p.model.broken = {"r"} if how == "row fails" else set()
    say_of_d(p, d, grant(d))
    sent = say(p, PREFILL, turns=3)
    finish_writes(p)
    sent += say(p)
    assert types(sent) == [KvClosed, AttemptFailed]
    assert sent[0].error == sent[1].reason
    assert sent[1].retryable


def test_a_passed_deadline_is_final(p: PrefillBench) -> None:
    p.clock.now += 1
    say(p, msgspec.structs.replace(PREFILL, token_ids=[1] * 60))
    p.clock.now += 9.0
    (failed,) = say(p)
    assert not failed.retryable


def test_nobody_waits_long_for_the_blocks_of_a_complete_output(p: PrefillBench) -> None:
    """The router has its last token and aborts nothing, even if the decode worker is gone."""
    sent = say(p, msgspec.structs.replace(PREFILL, sampling=greedy(1)), turns=3)
    assert types(sent) == [FirstToken]
    p.clock.now += 4.9
    assert say(p) == []
    p.clock.now += 0.2
    assert types(say(p)) == [AttemptFailed]


@pytest.mark.parametrize("is_resumable", [False, True])
def test_what_a_decode_worker_waits_for_outlives_its_router_if_it_may(
    p: PrefillBench, d: DecodeBench, is_resumable: bool
) -> None:
    say(p, msgspec.structs.replace(PREFILL, is_resumable=is_resumable))
    say_of_d(p, d, d.descriptor, grant(d))
    p.server.gone.append(ROUTER)
    sent = say(p, turns=2)
    finish_writes(p)
    sent += say(p)
    (closed,) = [message for message in sent if isinstance(message, KvClosed)]
    assert (closed.error, HandoffToken in types(sent)) == (
        ("", True) if is_resumable else ("aborted", False)
    )


def test_a_failure_that_no_other_worker_would_mend_is_final(
    p: PrefillBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_model, "NOT_FINITE", RowFailure("nothing may follow", False))
    p.model.broken = {"r"}
    (failed,) = say(p, PREFILL, turns=3)
    assert (failed.reason, failed.retryable) == ("nothing may follow", False)


def test_after_a_lapse_it_comes_back_when_nothing_of_before_is_left(
    p: PrefillBench, d: DecodeBench
) -> None:
    say(p, PREFILL)
    say_of_d(p, d, d.descriptor, grant(d))
    p.host.join(Lapsed())
    (refused,) = say(p, msgspec.structs.replace(PREFILL, request_id="new"))
    assert (refused.request_id, refused.retryable) == ("new", True)
    assert p.server.incarnations == [], "a write may still land"
    finish_writes(p)
    say(p, turns=2)
    assert len(p.server.incarnations) == 1
    assert types(say(p, msgspec.structs.replace(PREFILL, attempt=2), turns=3)) == [FirstToken]
    say(p, Abort(request_id="r", attempt=2))


def test_a_stopping_worker_takes_nothing_new(p: PrefillBench, d: DecodeBench) -> None:
    say(p, PREFILL)
    p.stop.since = p.clock.now
    assert not p.host.is_finished(num_jobs=1)
    assert p.announced == [WorkerState.DRAINING]
    sent = say(p, msgspec.structs.replace(PREFILL, request_id="late"))
    (failed,) = [m for m in sent if isinstance(m, AttemptFailed)]
    assert (failed.request_id, failed.retryable) == ("late", True)
    say_of_d(p, d, d.descriptor, grant(d), turns=3)
    finish_writes(p)
    assert PrefillDone in types(say(p))
    p.worker.run()
