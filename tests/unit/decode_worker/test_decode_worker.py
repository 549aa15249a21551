"""A decode worker keeps its promises to routers: tokens, attempts, ends, reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.runner import TOO_SLOW
from kv_transfer.handoff.key import HandoffKey
from kv_transfer.transfer_loop import NotificationArrived
from protocol.events import WorkerStats
from protocol.handoff_messages import KvClosed, KvGrant
from protocol.messages import (
    Abort,
    AttemptFailed,
    CacheDump,
    CacheDumpRequest,
    FinishReason,
    Generate,
    SetLimits,
    StepTokens,
)
from protocol.sampling import PromptLogprobs
from tests.sequences import greedy
from tests.unit import fake_model
from tests.unit.decode_worker.exchanges import (
    LOCAL,
    PROMPT,
    REMOTE,
    deliver,
    deliver_blocks,
    first_token,
    say,
    tokens_of,
    turn,
)
from tests.unit.fake_model import BLOCK, continuation, ranks_told
from tests.unit.held_grammar import HeldGrammar
from tests.unit.worker_harness import ROUTER, Clock, DecodeBench, Lapsed
from worker.cache_dumps import PIECE_BLOCKS
from worker.counters import Count


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
