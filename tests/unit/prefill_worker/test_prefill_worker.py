"""A prefill worker streams its blocks out, answers everybody, and keeps no block too long."""

from __future__ import annotations

import msgspec
import pytest

from engine.runner import TOO_SLOW
from protocol.handoff_messages import HandoffToken, KvBegun, KvClosed
from protocol.messages import Abort, AttemptFailed, FirstToken, FlightRequest, PrefillDone
from protocol.registration import WorkerState
from tests.sequences import greedy
from tests.unit import fake_model
from tests.unit.fake_model import continuation, ranks_told
from tests.unit.prefill_worker.prefill_harness import (
    PREFILL,
    PROMPT,
    ask,
    finish_writes,
    grant,
    say,
    say_of_d,
    types,
)
from tests.unit.worker_harness import ROUTER, DecodeBench, Lapsed, PrefillBench
from worker.counters import Count


def test_blocks_leave_before_the_prompt_is_through(p: PrefillBench, d: DecodeBench) -> None:
    say(p, PREFILL)
    say_of_d(p, d, d.descriptor, ask(d), grant(d))
    assert [write.source_blocks for write in p.transfers.writes] == [(0, 1), (2, 3)]
    sent = say(p)
    assert types(sent) == [FirstToken, HandoffToken]
    assert sent[0].token_id == continuation(PROMPT, 1)[0]
    finish_writes(p)
    assert types(say(p)) == [KvClosed, PrefillDone]
    assert p.counter(Count.BLOCKS_SENT) == 5


def test_it_says_that_a_prompt_has_begun_once_it_holds_blocks_for_all_of_it(
    p: PrefillBench, d: DecodeBench
) -> None:
    held = msgspec.structs.replace(PREFILL, request_id="held", token_ids=[1] * 60)
    say(p, held, turns=10)
    sent = say_of_d(p, d, d.descriptor, ask(d, request_id="held"), ask(d))
    assert types(sent) == [KvBegun, HandoffToken], "what is computed already is told at once"
    assert say(p, PREFILL, turns=2) == [], "there is no room for it"
    assert KvBegun in types(say(p, Abort(request_id="held", attempt=1)))
    say(p, Abort(request_id="r", attempt=1))


def test_who_asks_before_the_prompt_and_again_is_told_when_it_has_begun(
    p: PrefillBench, d: DecodeBench
) -> None:
    assert say_of_d(p, d, d.descriptor, ask(d), ask(d)) == []
    assert types(say(p, PREFILL)) == [KvBegun]
    assert types(say_of_d(p, d, ask(d)))[:1] == [KvBegun]
    say(p, Abort(request_id="r", attempt=1), turns=2)


def test_what_is_told_of_the_prompt_goes_with_the_first_token_to_both(
    p: PrefillBench, d: DecodeBench
) -> None:
    sampling = msgspec.structs.replace(PREFILL.sampling, prompt_logprobs=0)
    warm, scored = PREFILL, msgspec.structs.replace(PREFILL, sampling=sampling, attempt=2)
    say(p, warm, turns=3)
    say(p, Abort(request_id="r", attempt=1))
    say(p, scored)
    say_of_d(p, d, d.descriptor, ask(d, attempt=2), grant(d, attempt=2))
    sent = say(p)
    assert types(sent) == [FirstToken, HandoffToken]
    assert [ranks_told(each.prompt_logprobs) for each in sent] == [PROMPT[1:]] * 2
    assert sent[0].trace.cached_tokens == 0
    finish_writes(p)
    assert types(say(p)) == [KvClosed, PrefillDone]


@pytest.mark.parametrize("how", ["done", "aborted"])
def test_an_attempt_that_was_here_is_not_begun_again(
    p: PrefillBench, d: DecodeBench, how: str
) -> None:
    say(p, PREFILL)
    if how == "aborted":
        say(p, Abort(request_id="r", attempt=1))
    else:
        say_of_d(p, d, d.descriptor, ask(d), grant(d), turns=3)
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
    say_of_d(p, d, d.descriptor, ask(d), grant(d))
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
    say_of_d(p, d, ask(d))
    sent = say(p, PREFILL, turns=3)
    assert types(sent) == [KvBegun, KvClosed, AttemptFailed]
    assert sent[1].error == sent[2].reason
    assert sent[2].retryable


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
    say_of_d(p, d, d.descriptor, ask(d), grant(d))
    p.server.gone.append(ROUTER)
    sent = say(p, turns=2)
    finish_writes(p)
    sent += say(p)
    (closed,) = [message for message in sent if isinstance(message, KvClosed)]
    assert (closed.error, HandoffToken in types(sent)) == (
        ("", True) if is_resumable else ("aborted", False)
    )


def test_a_fault_of_the_request_is_final_and_both_are_told_its_code(
    p: PrefillBench, d: DecodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two workers the router hears first, it starts no other attempt."""
    monkeypatch.setattr(fake_model, "NOT_FINITE", TOO_SLOW)
    p.model.broken = {"r"}
    say_of_d(p, d, d.descriptor, ask(d))
    _begun, closed, failed = say(p, PREFILL, turns=3)
    assert (failed.reason, failed.retryable) == (TOO_SLOW.reason, False)
    assert failed.code == closed.code == "grammar_too_slow"
    assert (p.counter(Count.SLOW_GRAMMARS), p.counter(Count.FAILED_ROWS)) == (1, 0)


def test_after_a_lapse_it_comes_back_when_nothing_of_before_is_left(
    p: PrefillBench, d: DecodeBench
) -> None:
    say(p, PREFILL)
    say_of_d(p, d, d.descriptor, ask(d), grant(d))
    p.host.lifecycle.join(Lapsed())
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
    assert not p.host.lifecycle.is_finished(num_jobs=1)
    assert p.announced == [WorkerState.DRAINING]
    sent = say(p, msgspec.structs.replace(PREFILL, request_id="late"))
    (failed,) = [m for m in sent if isinstance(m, AttemptFailed)]
    assert (failed.request_id, failed.retryable) == ("late", True)
    say_of_d(p, d, d.descriptor, ask(d), grant(d), turns=3)
    finish_writes(p)
    assert PrefillDone in types(say(p))
    p.worker.run()


def test_a_refused_prompt_ends_the_ask_for_it(p: PrefillBench, d: DecodeBench) -> None:
    say_of_d(p, d, d.descriptor, ask(d))
    p.stop.since = p.clock.now
    p.host.lifecycle.is_finished(num_jobs=1)  # announces the drain
    sent = say(p, PREFILL)
    assert types(sent) == [AttemptFailed, KvClosed]
    assert p.source.num_open == 0


def test_asks_do_not_keep_a_lapsed_worker_from_coming_back(p: PrefillBench, d: DecodeBench) -> None:
    say_of_d(p, d, d.descriptor, ask(d))
    p.host.lifecycle.join(Lapsed())
    (closed,) = say(p)
    assert closed.error == "the source stood still"
    assert len(p.server.incarnations) == 1


def test_a_worker_that_waits_for_a_busy_decode_worker_does_not_stand_still(
    p: PrefillBench, d: DecodeBench
) -> None:
    """The pool is full of a prompt that has begun; the decode worker still asks, and another
    prompt waits."""
    held = msgspec.structs.replace(PREFILL, request_id="held", token_ids=[1] * 60)
    held = msgspec.structs.replace(held, deadline_ms=99_000)
    say(p, held, turns=10)
    say(p, msgspec.structs.replace(PREFILL, deadline_ms=99_000))
    say_of_d(p, d, d.descriptor, ask(d, request_id="held", ttl_ms=99_000))
    p.clock.now += 25.0
    say(p)
    assert p.announced == []
    say(p, Abort(request_id="held", attempt=1), Abort(request_id="r", attempt=1), turns=2)


def test_a_worker_whose_prompts_nobody_takes_says_that_it_stands_still(
    p: PrefillBench,
) -> None:
    held = msgspec.structs.replace(PREFILL, request_id="held", token_ids=[1] * 60)
    say(p, msgspec.structs.replace(held, deadline_ms=99_000), turns=10)
    say(p, msgspec.structs.replace(PREFILL, deadline_ms=99_000))
    p.clock.now += 25.0
    say(p)
    assert p.announced == [WorkerState.STALLED]
    say(p, Abort(request_id="held", attempt=1), Abort(request_id="r", attempt=1), turns=2)
    assert p.announced == [WorkerState.STALLED, WorkerState.READY]


def test_the_flight_recorder_tells_how_a_prompt_was_computed_and_written(
    p: PrefillBench, d: DecodeBench
) -> None:
    say_of_d(p, d, d.descriptor, ask(d))
    say(p, PREFILL, turns=4)
    say_of_d(p, d, grant(d))
    while p.transfers.writes:
        finish_writes(p)
        say(p, turns=2)
    (page,) = say(p, FlightRequest(nonce=3))
    kinds = [each.kind.value for each in page.events]
    assert kinds[:2] == ["received", "scheduled"]
    assert kinds.count("step") == kinds.count("chunk") == 3
    assert kinds[-1] == "finished"
    assert sum(each.number for each in page.events if each.kind == "write") == 5
    assert sum(each.tokens for each in page.events if each.kind == "chunk") == len(PROMPT)
    assert kinds.index("first_token") > kinds.index("chunk")
