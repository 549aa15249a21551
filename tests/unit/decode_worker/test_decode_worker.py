"""A decode worker keeps its promises to routers, and its blocks, whatever prefill workers do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.runner import TOO_SLOW
from kv_transfer.handoff.key import HandoffKey
from kv_transfer.transfer_loop import NotificationArrived
from protocol.events import WorkerStats
from protocol.handoff_messages import HandoffToken, KvAsk, KvBegun, KvClosed, KvGrant, KvWritten
from protocol.messages import (
    Abort,
    AttemptFailed,
    CacheDump,
    CacheDumpRequest,
    FinishReason,
    FlightPage,
    FlightRequest,
    Generate,
    KvPeer,
    SetLimits,
    StepTokens,
)
from protocol.registration import WorkerState
from protocol.sampling import PromptLogprobs
from protocol.wire import encode
from tests.sequences import greedy
from tests.unit import fake_model
from tests.unit.fake_model import BLOCK, continuation, ranks_told
from tests.unit.held_grammar import HeldGrammar
from tests.unit.worker_harness import LANDING_S, ROUTER, Clock, DecodeBench, Lapsed
from worker.cache_dumps import PIECE_BLOCKS
from worker.counters import Count

PEER = KvPeer(worker_id="p", incarnation="p-i", control="inproc://p")
PROMPT = list(range(10))
LOCAL = Generate(
    request_id="r", attempt=1, token_ids=PROMPT, num_output=0, sampling=greedy(4), deadline_ms=9000
)
REMOTE = msgspec.structs.replace(LOCAL, prefill=PEER)


@pytest.fixture(params=[False, True], ids=["one by one", "one ahead"])
def d(request: pytest.FixtureRequest) -> Iterator[DecodeBench]:
    bench = DecodeBench("d", Clock(), one_step_ahead=request.param)
    yield bench
    assert bench.scheduler.sequences == []
    assert bench.scheduler.blocks.num_pinned == 0, "blocks were left behind"
    assert bench.model.strays == []
    assert bench.sink.num_open == 0
    bench.scheduler.blocks.check()
    bench.close()


def say(d: DecodeBench, *messages: Any, turns: int = 1) -> list[Any]:
    """Messages from the router, turns of the loop, and what was answered."""
    d.server.inbox += [(ROUTER, message) for message in messages]
    return turn(d, turns)


def turn(d: DecodeBench, turns: int = 1) -> list[Any]:
    for _ in range(turns):
        d.worker.turn()
    return d.take_sent()


def tokens_of(messages: list[Any]) -> list[int]:
    steps = [message for message in messages if isinstance(message, StepTokens)]
    return [token for step in steps for each in step.sequences for token in each.token_ids]


def first_token(**changes: Any) -> HandoffToken:
    token = HandoffToken(
        request_id="r",
        attempt=1,
        index=0,
        token_id=continuation(PROMPT, 1)[0],
        cached_tokens=0,
        last_chunk_end_us=1,
    )
    return msgspec.structs.replace(token, **changes)


def deliver_blocks(d: DecodeBench) -> None:
    """All granted blocks arrive, with the prompt's contents."""
    deliver(d, next(m for _, m in d.peers.sent if isinstance(m, KvGrant)))


def deliver(d: DecodeBench, grant: KvGrant) -> None:
    for index, block in enumerate(grant.block_ids, grant.first_block):
        part = PROMPT[index * BLOCK : (index + 1) * BLOCK]
        d.memory[block, : len(part)] = d.memory.new_tensor(part)
    written = KvWritten(
        request_id="r",
        attempt=grant.attempt,
        first_block=grant.first_block,
        num_blocks=len(grant.block_ids),
    )
    d.transfers.events.append(NotificationArrived("agent of p", encode(written)))


def test_a_local_prompt_gives_its_tokens_and_one_end(d: DecodeBench) -> None:
    sent = say(d, LOCAL, turns=8)
    assert tokens_of(sent) == continuation(PROMPT, 4)
    finishes = [s.finish for m in sent for s in m.sequences if s.finish]
    assert finishes == [FinishReason.LENGTH]
    assert d.counter(Count.DECODE_TOKENS) == 4
    assert d.counter(Count.PREFILL_TOKENS) == len(PROMPT)


@pytest.mark.parametrize("cached", [0, 4])
def test_what_the_prefill_worker_computed_was_not_cached(d: DecodeBench, cached: int) -> None:
    """Even if all of it is cached here, so that no block moves."""
    say(d, LOCAL, turns=8)
    say(d, msgspec.structs.replace(REMOTE, attempt=2), turns=2)
    d.peers.inbox.append(("p-i", first_token(attempt=2, cached_tokens=cached)))
    grant = next(m for _, m in d.peers.sent if isinstance(m, KvGrant))
    deliver(d, grant)
    sent = turn(d, turns=8)
    told = [each.cached_tokens for m in sent if isinstance(m, StepTokens) for each in m.sequences]
    assert told == [cached, None, None, None]
    (trace,) = [each.trace for m in sent for each in m.sequences if each.trace]
    assert (trace.cached_tokens, trace.granted_blocks) == (8, 1)


def test_a_preempted_sequence_does_not_count_its_own_blocks_as_cached() -> None:
    d = DecodeBench("d", Clock(), num_blocks=6)
    prompt = list(range(20, 30))
    other = msgspec.structs.replace(LOCAL, request_id="s", token_ids=prompt, sampling=greedy(9))
    sent = say(d, msgspec.structs.replace(LOCAL, sampling=greedy(9)), other, turns=40)
    assert d.counter(Count.PREEMPTIONS) > 0
    ends = [each for m in sent for each in m.sequences if each.finish]
    assert [each.trace.cached_tokens for each in ends] == [0, 0]
    d.close()


def test_tokens_leave_between_the_pieces_of_a_dump() -> None:
    """100,000 cached blocks, asked for piece by piece while a request runs."""
    d = DecodeBench("d", Clock(), num_blocks=100_200)
    manager = d.scheduler.blocks
    cached = manager.allocate(100_000)
    for block in cached:
        manager.publish(block, block.to_bytes(16, "big"))
    manager.release(cached)
    say(d, msgspec.structs.replace(LOCAL, sampling=greedy(400)), turns=4)
    expected = manager.hashes()
    sent = say(d, CacheDumpRequest())
    hashes = list(sent[0].hashes)
    while not sent[-2].is_last:
        sent += say(d, CacheDumpRequest(first=len(hashes)))
        hashes += sent[-2].hashes
    kinds = [type(each) for each in sent]
    assert kinds == [CacheDump, StepTokens] * -(-len(expected) // PIECE_BLOCKS)
    assert hashes == expected
    say(d, Abort(request_id="r", attempt=1), turns=2)
    d.close()


def test_blocks_and_first_token_of_a_peer_are_gone_on_with(d: DecodeBench) -> None:
    assert say(d, REMOTE) == []
    deliver_blocks(d)
    d.peers.inbox.append(("p-i", first_token()))
    assert tokens_of(turn(d, 5)) == continuation(PROMPT, 4)
    assert d.counter(Count.HANDOFFS) == 1
    assert d.counter(Count.BLOCKS_RECEIVED) == 3
    assert d.counter(Count.PREFILL_TOKENS) == 0


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_grammar_that_is_being_compiled_keeps_one_out_of_the_batch_and_waits_for_nobody(
    d: DecodeBench, is_aborted: bool
) -> None:
    grammar = HeldGrammar(is_ready=False)
    say(d, REMOTE)
    task = d.role.tasks.find(HandoffKey("r", 1))
    assert task is not None
    task.sequence.grammar = grammar
    deliver_blocks(d)
    d.peers.inbox.append(("p-i", first_token()))
    other = msgspec.structs.replace(LOCAL, request_id="other")
    assert tokens_of(say(d, other, turns=8)) == continuation(PROMPT, 4)
    if is_aborted:
        say(d, Abort(request_id="r", attempt=1))
        expected = []
    else:
        expected = continuation(PROMPT, 4)
    grammar.is_ready = True
    assert tokens_of(turn(d, 8)) == expected


@pytest.mark.parametrize("message", [LOCAL, REMOTE], ids=["local", "remote"])
def test_what_is_told_of_the_prompt_goes_with_the_first_token_alone(
    d: DecodeBench, message: Generate
) -> None:
    sampling = msgspec.structs.replace(message.sampling, prompt_logprobs=0)
    sent = say(d, msgspec.structs.replace(message, sampling=sampling))
    if message is REMOTE:
        ranks = b"".join(each.to_bytes(4, "little") for each in PROMPT[1:])
        told = PromptLogprobs(0, bytes(len(ranks)), ranks, b"", b"")
        deliver_blocks(d)
        d.peers.inbox.append(("p-i", first_token(prompt_logprobs=told)))
    sent += turn(d, 8)
    told_of = [ranks_told(each.prompt_logprobs) for step in sent for each in step.sequences]
    assert told_of == [PROMPT[1:], None, None, None]
    assert tokens_of(sent) == continuation(PROMPT, 4)


def test_a_message_tells_of_one_prompt_at_most(d: DecodeBench) -> None:
    """The log-probabilities of a long prompt take long messages, whose length is bounded."""
    sampling = msgspec.structs.replace(LOCAL.sampling, prompt_logprobs=0)
    asked = [
        msgspec.structs.replace(LOCAL, request_id=name, token_ids=[number], sampling=sampling)
        for number, name in enumerate(("one", "two", "three"))
    ]
    sent = say(d, *asked, turns=10)
    told = [sum(each.prompt_logprobs is not None for each in step.sequences) for step in sent]
    assert sum(told) == 3
    assert max(told) == 1


def test_a_later_attempt_does_not_tell_of_the_prompt_again(d: DecodeBench) -> None:
    sampling = msgspec.structs.replace(LOCAL.sampling, prompt_logprobs=0)
    tokens = PROMPT + continuation(PROMPT, 1)
    again = msgspec.structs.replace(LOCAL, token_ids=tokens, num_output=1, sampling=sampling)
    sent = say(d, again, turns=8)
    assert [each.prompt_logprobs for step in sent for each in step.sequences] == [None] * 3


@pytest.mark.parametrize("message", [LOCAL, REMOTE], ids=["local", "remote"])
@pytest.mark.parametrize("how", ["finished", "aborted"])
def test_an_attempt_that_was_here_is_not_begun_again(
    d: DecodeBench, message: Generate, how: str
) -> None:
    say(d, message)
    if how == "aborted":
        say(d, Abort(request_id="r", attempt=1))
        d.peers.inbox.append(("p-i", KvClosed(request_id="r", attempt=1)))
    elif message is REMOTE:
        deliver_blocks(d)
        d.peers.inbox.append(("p-i", first_token()))
    turn(d, 8)
    stale = d.counter(Count.STALE_MESSAGES)
    assert say(d, message, turns=3) == []
    assert d.counter(Count.STALE_MESSAGES) == stale + 1


def test_an_older_attempt_does_not_end_a_newer_one(d: DecodeBench) -> None:
    newer = msgspec.structs.replace(LOCAL, attempt=2)
    sent = say(d, newer, LOCAL, turns=8)
    assert {s.attempt for m in sent for s in m.sequences} == {2}
    assert tokens_of(sent) == continuation(PROMPT, 4)


def test_an_abort_of_an_older_attempt_does_not_end_a_newer_one(d: DecodeBench) -> None:
    stale = d.counter(Count.STALE_MESSAGES)
    sent = say(d, msgspec.structs.replace(LOCAL, attempt=2))
    sent += say(d, Abort(request_id="r", attempt=1), turns=8)
    assert tokens_of(sent) == continuation(PROMPT, 4)
    assert d.counter(Count.STALE_MESSAGES) == stale + 1


@pytest.mark.parametrize("how", ["gone", "forgotten", "closed"])
@pytest.mark.parametrize("blocks_came", [False, True])
def test_a_first_token_that_cannot_come_is_not_waited_for(
    d: DecodeBench, how: str, blocks_came: bool
) -> None:
    say(d, REMOTE)
    if blocks_came:
        deliver_blocks(d)
        turn(d)
    if how == "closed":
        d.peers.inbox.append(("p-i", KvClosed(request_id="r", attempt=1, error="broken")))
    else:
        (d.peers.dead if how == "gone" else d.peers.forgotten).append("p-i")
    (failed,) = turn(d)
    assert isinstance(failed, AttemptFailed)
    assert failed.retryable
    # What arrived is cached for the next attempt.
    assert d.scheduler.blocks.num_cached == (2 if blocks_came else 0)
    if how == "forgotten" and not blocks_came:  # it lives, and has to answer
        d.peers.inbox.append(("p-i", KvClosed(request_id="r", attempt=1)))
    turn(d)
    d.clock.now += LANDING_S
    turn(d)


@pytest.mark.parametrize("blocks_came", [False, True])
def test_a_fault_of_the_request_that_the_prefill_worker_tells_of_is_final(
    d: DecodeBench, blocks_came: bool
) -> None:
    say(d, REMOTE)
    if blocks_came:
        deliver_blocks(d)
        turn(d)
    closed = KvClosed(request_id="r", attempt=1, error="too slow", code="grammar_too_slow")
    d.peers.inbox.append(("p-i", closed))
    (failed,) = turn(d)
    assert isinstance(failed, AttemptFailed)
    assert (failed.reason, failed.retryable) == ("too slow", False)
    assert failed.code == "grammar_too_slow"
    d.clock.now += LANDING_S
    turn(d)


def test_a_fault_of_the_request_while_it_decodes_is_told_after_its_tokens(
    d: DecodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_model, "NOT_FINITE", TOO_SLOW)
    sent = say(d, LOCAL, turns=2)
    d.model.broken = {"r"}
    sent += turn(d)
    *tokens, failed = sent
    assert isinstance(failed, AttemptFailed)
    assert (failed.code, failed.retryable) == ("grammar_too_slow", False)
    assert tokens_of(tokens) == continuation(PROMPT, len(tokens))
    assert (d.counter(Count.SLOW_GRAMMARS), d.counter(Count.FAILED_ROWS)) == (1, 0)


def test_a_sequence_that_waits_for_its_mask_is_counted_and_others_go_on(d: DecodeBench) -> None:
    grammar = HeldGrammar(is_slow=True)
    say(d, LOCAL)
    task = d.role.tasks.find(HandoffKey("r", 1))
    assert task is not None
    task.sequence.grammar = grammar
    other = msgspec.structs.replace(LOCAL, request_id="other")
    tokens = tokens_of(turn(d, 3)) + tokens_of(say(d, other, turns=8))
    assert tokens[-4:] == continuation(PROMPT, 4), "the other's"
    assert d.counter(Count.MASK_WAITS) == 1
    assert task.sequence.block_table
    while not grammar.is_closed:
        grammar.give_mask()
        turn(d)
    assert task.sequence.tokens[len(PROMPT) :] == continuation(PROMPT, 4)


@pytest.mark.parametrize("has_come", ["nothing", "blocks", "token"])
def test_a_prefill_worker_that_falls_silent_is_not_waited_for_but_may_yet_write(
    d: DecodeBench, has_come: str
) -> None:
    say(d, REMOTE)
    if has_come == "blocks":
        deliver_blocks(d)
    if has_come == "token":
        d.peers.inbox.append(("p-i", first_token()))
    turn(d)
    d.peers.mute = ["another"]
    assert turn(d) == []
    d.peers.mute = ["p-i"]
    (failed,) = turn(d)
    assert isinstance(failed, AttemptFailed)
    assert failed.retryable
    d.clock.now += 100 * LANDING_S
    turn(d)
    fenced = 0 if has_come == "blocks" else 3
    assert d.sink.num_fenced_blocks == d.scheduler.blocks.num_pinned == fenced
    (failed,) = say(d, msgspec.structs.replace(REMOTE, attempt=2))
    assert isinstance(failed, AttemptFailed)
    assert d.sink.num_fenced_blocks == d.scheduler.blocks.num_pinned == fenced
    d.peers.inbox.append(("p-i", KvClosed(request_id="r", attempt=1)))
    turn(d)


def test_what_needs_nothing_of_a_silent_prefill_worker_goes_on(d: DecodeBench) -> None:
    say(d, REMOTE)
    deliver_blocks(d)
    d.peers.inbox.append(("p-i", first_token()))
    first = tokens_of(turn(d))
    d.peers.mute = ["p-i"]
    assert first + tokens_of(turn(d, 5)) == continuation(PROMPT, 4)


def test_only_the_named_prefill_worker_gives_the_first_token(d: DecodeBench) -> None:
    say(d, REMOTE)
    deliver_blocks(d)
    d.peers.inbox.append(("another", first_token(token_id=3)))
    assert turn(d) == []
    assert d.counter(Count.STALE_MESSAGES) == 1
    d.peers.inbox.append(("p-i", first_token()))
    assert tokens_of(turn(d, 5)) == continuation(PROMPT, 4)


@pytest.mark.parametrize("changes", [{"token_id": 50}, {"token_id": -1}, {"index": 1}])
def test_an_impossible_first_token_fails_its_attempt(
    d: DecodeBench, changes: dict[str, int]
) -> None:
    say(d, REMOTE)
    deliver_blocks(d)
    d.peers.inbox.append(("p-i", first_token(**changes)))
    (failed,) = turn(d)
    assert failed.retryable
    turn(d)


def test_tokens_come_before_the_failure_that_ends_them(d: DecodeBench) -> None:
    say(d, REMOTE)
    deliver_blocks(d)
    d.peers.inbox.append(("p-i", first_token()))
    d.model.explodes = "launch"
    tokens, failed = turn(d)
    assert tokens_of([tokens]) == continuation(PROMPT, 1)
    assert isinstance(failed, AttemptFailed)
    assert d.counter(Count.FAILED_STEPS) == 1


def test_logits_that_are_not_finite_fail_one_sequence_alone(d: DecodeBench) -> None:
    d.model.broken = {"sick"}
    sick = msgspec.structs.replace(LOCAL, request_id="sick", token_ids=[7] * 10)
    sent = say(d, sick, LOCAL, turns=10)
    (failed,) = [m for m in sent if isinstance(m, AttemptFailed)]
    assert (failed.request_id, failed.retryable) == ("sick", True)
    assert tokens_of(sent) == continuation(PROMPT, 4)
    assert d.counter(Count.FAILED_ROWS) == 1
    assert d.counter(Count.FAILED_STEPS) == 0
    cached = d.scheduler.blocks.hashes()
    assert len(cached) == 3, "only the healthy sequence's blocks are offered"


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


def test_a_lost_router_takes_its_requests_along(d: DecodeBench) -> None:
    say(d, LOCAL, REMOTE)
    d.server.gone.append(ROUTER)
    assert turn(d) == []


def test_a_deadline_that_passes_is_final_and_fences_what_was_granted(d: DecodeBench) -> None:
    say(d, REMOTE)
    d.clock.now += 9.0
    (failed,) = turn(d)
    assert not failed.retryable
    assert d.scheduler.blocks.num_pinned == 3, "the peer may still write"
    d.peers.inbox.append(("p-i", KvClosed(request_id="r", attempt=1)))
    turn(d)


def test_every_counter_is_in_every_report(d: DecodeBench) -> None:
    turn(d)
    (stats,) = [m for m in d.published if isinstance(m, WorkerStats)]
    assert stats.counters == dict.fromkeys([name.value for name in Count], 0)


def test_refused_frames_of_all_sources_add_up(d: DecodeBench) -> None:
    d.transfers.events.append(NotificationArrived("agent of p", b"junk"))
    d.server.refused = {"foreign": 2}
    d.peers.refused = 4
    turn(d, 2)
    assert d.counter(Count.FRAMES_REFUSED) == 7


def test_blocks_are_granted_when_no_step_under_way_writes_to_them() -> None:
    """The peer's data are there as soon as it has the grant; the step is computed after that."""
    d = DecodeBench("d", Clock(), num_blocks=4, one_step_ahead=True)
    send = d.peers.send

    def send_and_write(incarnation: str, message: Any) -> None:
        send(incarnation, message)
        if isinstance(message, KvGrant):
            deliver_blocks(d)

    d.peers.send = send_and_write  # type: ignore[method-assign]
    other = msgspec.structs.replace(LOCAL, request_id="other", token_ids=list(range(30, 40)))
    say(d, other, turns=4)
    assert d.engine.is_ahead
    say(d, Abort(request_id="other", attempt=1), REMOTE)
    turn(d)
    d.peers.inbox.append(("p-i", first_token()))
    assert tokens_of(turn(d, 6)) == continuation(PROMPT, 4)
    assert d.model.strays == []
    d.close()


# -- sources that have not begun ------------------------------------------------------------------


@pytest.fixture
def unbegun(d: DecodeBench) -> DecodeBench:
    """REMOTE has asked, and its source has not answered."""
    d.peers.answers_asks = False
    assert say(d, REMOTE, turns=2) == []
    assert [type(message) for _, message in d.peers.sent] == [KvAsk]
    assert d.scheduler.blocks.num_pinned == 0
    return d


def test_nothing_is_reserved_before_the_source_has_begun(unbegun: DecodeBench) -> None:
    d = unbegun
    unbegun.peers.inbox.append(("p-i", KvBegun(request_id="r", attempt=1)))
    turn(d)
    assert d.scheduler.blocks.num_pinned == d.sink.num_fenced_blocks == 3
    deliver_blocks(d)
    d.peers.inbox.append(("p-i", first_token()))
    assert tokens_of(turn(d, 5)) == continuation(PROMPT, 4)


def test_the_first_token_may_come_before_anything_was_granted(unbegun: DecodeBench) -> None:
    d = unbegun
    d.peers.inbox.append(("p-i", first_token()))
    assert turn(d) == []
    d.peers.inbox.append(("p-i", KvBegun(request_id="r", attempt=1)))
    turn(d)
    deliver_blocks(d)
    assert tokens_of(turn(d, 5)) == continuation(PROMPT, 4)


@pytest.mark.parametrize("how", ["gone", "closed", "silent", "reset"])
def test_what_waits_for_a_source_that_will_not_begin_fails_at_once(
    unbegun: DecodeBench, how: str
) -> None:
    d = unbegun
    if how == "gone":
        d.peers.dead.append("p-i")
    elif how == "closed":
        closed = KvClosed(request_id="r", attempt=1, error="no prompt came in time")
        d.peers.inbox.append(("p-i", closed))
    elif how == "silent":
        d.peers.mute = ["p-i"]
    else:
        d.peers.forgotten.append("p-i")
    (failed,) = turn(d)
    assert isinstance(failed, AttemptFailed)
    assert (failed.retryable, failed.lacks_room) == (True, False)
    assert d.sink.num_fenced_blocks == d.scheduler.blocks.num_pinned == 0


def test_a_client_that_goes_away_before_the_grant_leaves_no_fence(unbegun: DecodeBench) -> None:
    d = unbegun
    say(d, Abort(request_id="r", attempt=1))
    assert [type(message) for _, message in d.peers.sent] == [KvAsk, Abort]
    d.peers.inbox.append(("p-i", KvBegun(request_id="r", attempt=1)))
    assert turn(d, 3) == []
    assert d.sink.num_fenced_blocks == d.scheduler.blocks.num_pinned == 0


@pytest.mark.parametrize("is_remote", [False, True])
def test_what_fits_only_beside_blocks_of_a_silent_worker_is_given_back_at_once(
    d: DecodeBench, is_remote: bool
) -> None:
    """A pool of 16 blocks, of which 13 stay fenced."""
    held = msgspec.structs.replace(REMOTE, token_ids=[1] * 50, request_id="held")
    say(d, held)
    d.peers.mute = ["p-i"]
    (failed,) = turn(d)
    assert (failed.request_id, failed.lacks_room) == ("held", False)
    other = KvPeer(worker_id="q", incarnation="q-i", control="inproc://q")
    large = msgspec.structs.replace(
        LOCAL, token_ids=list(range(16)), prefill=other if is_remote else None
    )
    (failed,) = say(d, large)
    assert (failed.request_id, failed.retryable, failed.lacks_room) == ("r", True, True)
    small = msgspec.structs.replace(LOCAL, attempt=2, sampling=greedy(2))
    d.clock.now += 0.2
    assert tokens_of(say(d, small, turns=8)) == continuation(PROMPT, 2)
    stats = [each for each in d.published if isinstance(each, WorkerStats)][-1]
    assert stats.blocks_stuck == 13
    d.peers.inbox.append(("p-i", KvClosed(request_id="held", attempt=1)))
    turn(d)


def test_one_that_has_outgrown_what_stuck_blocks_leave_is_given_back(d: DecodeBench) -> None:
    held = msgspec.structs.replace(REMOTE, token_ids=[1] * 50, request_id="held")
    say(d, held)
    d.peers.mute = ["p-i"]
    turn(d)
    grows = msgspec.structs.replace(LOCAL, sampling=greedy(9))
    sent = say(d, grows, turns=12)
    (failed,) = (message for message in sent if isinstance(message, AttemptFailed))
    assert failed.lacks_room
    assert tokens_of(sent) == continuation(PROMPT, 9)[: len(tokens_of(sent))] != []
    d.peers.inbox.append(("p-i", KvClosed(request_id="held", attempt=1)))
    turn(d)


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


def test_an_output_that_its_first_token_completes_needs_no_room_here(
    unbegun: DecodeBench,
) -> None:
    """Nothing was granted for it: the source is told to stop, and the router gets the token."""
    d = unbegun
    task = d.role.tasks.find(HandoffKey("r", 1))
    assert task is not None
    task.sequence.sampling = greedy(1)
    d.peers.inbox.append(("p-i", first_token(finish=FinishReason.LENGTH)))
    sent = turn(d)
    assert tokens_of(sent) == continuation(PROMPT, 1)
    (tokens,) = (each for step in sent for each in step.sequences)
    assert tokens.finish is FinishReason.LENGTH
    assert [type(message) for _, message in d.peers.sent] == [KvAsk, Abort]
    d.peers.inbox.append(("p-i", KvBegun(request_id="r", attempt=1)))
    assert turn(d, 3) == []
    assert d.scheduler.blocks.num_pinned == 0


def test_a_first_token_that_wrongly_ends_the_output_fails_the_attempt(
    unbegun: DecodeBench,
) -> None:
    unbegun.peers.inbox.append(("p-i", first_token(finish=FinishReason.STOP)))
    (failed,) = turn(unbegun)
    assert (type(failed), failed.retryable) == (AttemptFailed, True)


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


@pytest.mark.parametrize(
    ("device", "asked", "taken"),
    [
        ("cpu", SetLimits(chunk_max_tokens=4096), (4096, 50.0)),
        ("cpu", SetLimits(chunk_max_tokens=1), (BLOCK, 50.0)),
        ("cuda", SetLimits(chunk_max_tokens=4096), (512, 50.0)),
        ("cuda", SetLimits(chunk_max_tokens=256, itl_target_ms=30.0), (256, 30.0)),
        ("cpu", SetLimits(itl_target_ms=-1.0), (512, 50.0)),
    ],
)
def test_limits_of_steps_change_as_far_as_memory_allows(
    d: DecodeBench, device: str, asked: SetLimits, taken: tuple[int, float]
) -> None:
    member = Lapsed(has_lapsed=False)
    d.host.lifecycle.join(member)
    d.host.settings.device, d.host.planned_chunk = device, 512
    d.scheduler.config = replace(
        d.scheduler.config, chunk_min_tokens=BLOCK, chunk_max_tokens=512, itl_target_s=0.05
    )
    say(d, asked)
    config = d.scheduler.config
    assert (config.chunk_max_tokens, pytest.approx(config.itl_target_s)) == (
        taken[0],
        taken[1] / 1e3,
    )
    assert member.limits == (taken[0], pytest.approx(taken[1]))


def recorded(d: DecodeBench) -> list[tuple[str, int, int]]:
    """Kind, number and tokens of each event in the answer to a router that asks for them."""
    (page,) = say(d, FlightRequest(nonce=7, request_id="r"))
    assert isinstance(page, FlightPage)
    assert (page.nonce, page.after) == (7, 0)
    assert {each.request_id for each in page.events} <= {"r", ""}
    return [(each.kind.value, each.number, each.tokens) for each in page.events]


def test_the_flight_recorder_tells_how_a_request_came_from_a_peer_and_ended(
    d: DecodeBench,
) -> None:
    say(d, REMOTE)
    deliver_blocks(d)
    d.peers.inbox.append(("p-i", first_token()))
    turn(d, 6)
    events = recorded(d)
    assert [each for each in events if each[0] != "step"] == [
        ("received", 0, 10),
        ("admitted", 3, 0),
        ("first_token", 0, 0),
        ("arrived", 3, 0),
        ("finished", 0, 4),
    ]
    assert [each for each in events if each[0] == "step"] == [("step", 1, 0)] * 3


def test_the_flight_recorder_tells_how_a_local_prompt_was_computed_and_failed(
    d: DecodeBench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    say(d, msgspec.structs.replace(LOCAL, trace_id="a" * 32), turns=2)
    d.clock.now += 60.0
    turn(d)
    events = recorded(d)
    assert ("chunk", 0, 8) in events
    assert events[-1][0] == "failed"
    (line,) = [each for each in caplog.records if "failed" in each.message]
    assert line.message == "attempt 1 of request r failed: its deadline passed"
    assert (line.request_id, line.trace_id) == ("r", "a" * 32)  # type: ignore[attr-defined]


def test_a_trace_id_that_is_none_is_refused(d: DecodeBench) -> None:
    (failed,) = say(d, msgspec.structs.replace(LOCAL, trace_id="not a trace\n"))
    assert isinstance(failed, AttemptFailed)
    assert failed.reason == "a trace id has 32 hexadecimal digits"
