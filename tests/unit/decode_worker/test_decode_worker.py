"""A decode worker keeps its promises to routers, and its blocks, whatever prefill workers do."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from engine.sampling.grammar import GrammarMatcher, Grammars
from kv_transfer.handoff.key import HandoffKey
from kv_transfer.transfer_loop import NotificationArrived
from protocol.events import WorkerStats
from protocol.messages import (
    Abort,
    AttemptFailed,
    FinishReason,
    Generate,
    HandoffToken,
    KvClosed,
    KvGrant,
    KvWritten,
    PrefillPeer,
    StepTokens,
)
from protocol.registration import WorkerState
from protocol.sampling import PromptLogprobs
from protocol.wire import encode
from tests.sequences import greedy
from tests.unit.fake_model import BLOCK, VOCAB, continuation, ranks_told
from tests.unit.worker_harness import DEMO_TOKENIZER, LANDING_S, ROUTER, Clock, DecodeBench
from worker.counters import Count

PEER = PrefillPeer(worker_id="p", incarnation="p-i", control="inproc://p")
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
    assert bench.receiver.num_open == 0
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
    grant = next(m for _, m in d.peers.sent if isinstance(m, KvGrant))
    for index, block in enumerate(grant.block_ids, grant.first_block):
        part = PROMPT[index * BLOCK : (index + 1) * BLOCK]
        d.memory[block, : len(part)] = d.memory.new_tensor(part)
    written = KvWritten(
        request_id="r", attempt=1, first_block=grant.first_block, num_blocks=len(grant.block_ids)
    )
    d.transfers.events.append(NotificationArrived("agent of p", encode(written)))


def test_a_local_prompt_gives_its_tokens_and_one_end(d: DecodeBench) -> None:
    sent = say(d, LOCAL, turns=8)
    assert tokens_of(sent) == continuation(PROMPT, 4)
    finishes = [s.finish for m in sent for s in m.sequences if s.finish]
    assert finishes == [FinishReason.LENGTH]
    assert d.counter(Count.DECODE_TOKENS) == 4
    assert d.counter(Count.PREFILL_TOKENS) == len(PROMPT)


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
    compiled: Future[LLMatcher] = Future()
    say(d, REMOTE)
    task = d.worker._tasks.find(HandoffKey("r", 1))
    assert task is not None
    task.sequence.grammar = GrammarMatcher(compiled)
    deliver_blocks(d)
    d.peers.inbox.append(("p-i", first_token()))
    other = msgspec.structs.replace(LOCAL, request_id="other")
    assert tokens_of(say(d, other, turns=8)) == continuation(PROMPT, 4)
    if is_aborted:
        say(d, Abort(request_id="r", attempt=1))
        expected = []
    else:
        expected = continuation(PROMPT, 4)
    anything = Grammars(DEMO_TOKENIZER, VOCAB, ()).matcher("start: /(.|\\n)*/", [])
    compiled.set_result(anything.state)
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
    """What is told of a long prompt is long, and frames are bounded."""
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
    assert d.receiver.num_fenced_blocks == d.scheduler.blocks.num_pinned == fenced
    (failed,) = say(d, msgspec.structs.replace(REMOTE, attempt=2))
    assert isinstance(failed, AttemptFailed)
    assert d.receiver.num_fenced_blocks == d.scheduler.blocks.num_pinned == fenced
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
    assert not d.host.is_finished(num_jobs=1)
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
    (failed,) = d.take_sent()
    assert isinstance(failed, AttemptFailed)
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
