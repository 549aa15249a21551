"""The states that a decode worker announces: draining, stalled, ready again."""

from __future__ import annotations

import msgspec
import pytest

from kv_transfer.handoff.key import HandoffKey
from protocol.handoff_messages import KvClosed
from protocol.messages import (
    Abort,
    AttemptFailed,
)
from protocol.registration import WorkerState
from tests.unit.decode_worker.exchanges import LOCAL, PROMPT, REMOTE, say, tokens_of, turn
from tests.unit.fake_model import continuation
from tests.unit.worker_harness import DecodeBench, Lapsed
from worker.counters import Count


def test_a_stopping_worker_says_so_first_and_finishes_what_it_has(d: DecodeBench) -> None:
    say(d, LOCAL)
    d.stop.since = d.clock.now
    assert not d.host.lifecycle.is_finished(num_jobs=1)
    assert d.announced == [WorkerState.DRAINING]
    late = msgspec.structs.replace(LOCAL, request_id="late")
    sent = say(d, late, turns=8)
    (failed,) = [m for m in sent if isinstance(m, AttemptFailed)]
    assert (failed.request_id, failed.retryable) == ("late", True)
    assert tokens_of(sent) == continuation(PROMPT, 4)
    d.worker.run()
    assert d.announced == [WorkerState.DRAINING]


def test_what_is_not_finished_within_the_grace_is_handed_back(d: DecodeBench) -> None:
    say(d, LOCAL)
    d.stop.since = d.clock.now - 5.0
    d.worker.run()
    (failed,) = [m for m in d.take_sent() if isinstance(m, AttemptFailed)]
    assert failed.retryable


def test_a_worker_that_stands_still_says_so_and_takes_no_requests_until_it_goes_on(
    d: DecodeBench, caplog: pytest.LogCaptureFixture
) -> None:
    """A granted prompt of which nothing comes fills the pool; another one has begun."""
    say(
        d,
        msgspec.structs.replace(REMOTE, token_ids=[1] * 60, request_id="held", deadline_ms=99_000),
    )
    say(d, msgspec.structs.replace(REMOTE, deadline_ms=99_000))
    d.clock.now += 19.9
    turn(d)
    assert d.announced == []
    d.clock.now += 0.2
    turn(d)
    assert d.announced == [WorkerState.STALLED]
    assert d.counter(Count.STALLS) == 1
    held = HandoffKey("held", 1)
    assert f"15 blocks: {held}, receiving, from p" in caplog.text
    say(d, Abort(request_id="held", attempt=1))
    d.peers.inbox.append(("p-i", KvClosed(request_id="held", attempt=1)))
    turn(d, 2)
    assert d.announced == [WorkerState.STALLED, WorkerState.READY]
    say(d, Abort(request_id="r", attempt=1))
    d.peers.inbox.append(("p-i", KvClosed(request_id="r", attempt=1)))
    turn(d)


def test_a_draining_worker_that_goes_on_after_an_alarm_stays_draining(d: DecodeBench) -> None:
    held = msgspec.structs.replace(REMOTE, token_ids=[1] * 60, request_id="held")
    say(d, msgspec.structs.replace(held, deadline_ms=99_000))
    say(d, msgspec.structs.replace(REMOTE, deadline_ms=99_000))
    d.stop.since = d.clock.now
    d.host.lifecycle.is_finished(num_jobs=2)
    d.clock.now += 21.0
    turn(d)
    assert d.counter(Count.STALLS) == 1
    say(d, Abort(request_id="held", attempt=1), Abort(request_id="r", attempt=1))
    d.peers.inbox.append(("p-i", KvClosed(request_id="held", attempt=1)))
    turn(d, 2)
    assert d.announced == [WorkerState.DRAINING]


def test_a_worker_that_was_asked_to_drain_goes_on_when_that_is_taken_back(d: DecodeBench) -> None:
    member = Lapsed(has_lapsed=False, is_asked_to_drain=True)
    d.host.lifecycle.join(member)
    assert not d.host.lifecycle.is_finished(num_jobs=1)
    assert d.host.lifecycle.is_draining
    member.is_asked_to_drain = False
    assert not d.host.lifecycle.is_finished(num_jobs=0)
    assert not d.host.lifecycle.is_draining
    assert d.announced == [WorkerState.DRAINING, WorkerState.READY]


def test_a_signal_is_not_taken_back(d: DecodeBench) -> None:
    member = Lapsed(has_lapsed=False, is_asked_to_drain=True)
    d.host.lifecycle.join(member)
    assert not d.host.lifecycle.is_finished(num_jobs=1)
    d.stop.is_final = True
    member.is_asked_to_drain = False
    assert d.host.lifecycle.is_finished(num_jobs=0)
    assert d.host.lifecycle.is_draining
