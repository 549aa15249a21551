"""A prefill worker that launches each step before the tokens of the one before are read.

The stand-in for a card computes as late as a card may: when its result is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from engine.runner import NOT_FINITE
from protocol.handoff_messages import HandoffToken, KvBegun, KvClosed
from protocol.messages import Abort, AttemptFailed, FirstToken, PrefillDone
from tests.sequences import greedy
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
from tests.unit.worker_harness import Clock, DecodeBench, PrefillBench, land
from worker.counters import Count

SHORT = msgspec.structs.replace(PREFILL, request_id="short", token_ids=[9, 8, 7, 6, 5])
"""One chunk, of two blocks."""


@pytest.fixture
def p() -> Iterator[PrefillBench]:
    """The worker under test; nothing of it may be left when the test ends."""
    bench = PrefillBench("p", Clock(), one_step_ahead=True)
    yield bench
    assert bench.model.strays == [], "a block was written to that was free, or that a peer read"
    assert bench.scheduler.sequences == []
    assert bench.scheduler.blocks.num_pinned == 0, "blocks were left behind"
    assert bench.source.num_open == bench.source.num_outstanding == 0
    assert not bench.engine.is_ahead
    bench.scheduler.blocks.check()
    bench.close()


def offered(p: PrefillBench) -> list[tuple[tuple[int, ...], bool]]:
    """The blocks that the transfer thread has, and whether it may post them."""
    return [(write.source_blocks, write.fence.is_done()) for write in p.transfers.writes]


def ask_for(p: PrefillBench, d: DecodeBench, *prompts: Any) -> None:
    """The decode worker asks for these prompts, which are here."""
    asks = [ask(d, request_id=prompt.request_id) for prompt in prompts]
    p.server.inbox += [(d.as_peer, message) for message in (d.descriptor, *asks)]


def test_each_step_is_launched_before_the_last_is_read_and_a_prompts_tokens_are_the_same(
    p: PrefillBench, d: DecodeBench
) -> None:
    ask_for(p, d, PREFILL)
    assert types(say(p, PREFILL)) == [KvBegun]
    assert p.model.log == ["launch 0"]
    assert say_of_d(p, d, grant(d)) == []
    assert p.model.log == ["launch 0", "launch 1", "read 0"]
    assert offered(p) == [((0, 1), True), ((2, 3), False)]
    assert say(p) == []
    assert p.model.log[3:] == ["launch 2", "read 1"]
    assert offered(p) == [((0, 1), True), ((2, 3), True)], "the last block comes with its token"
    first, token = say(p)
    assert p.model.log[5:] == ["read 2"]
    assert (type(first), type(token)) == (FirstToken, HandoffToken)
    assert first.token_id == token.token_id == continuation(PROMPT, 1)[0]
    assert offered(p)[2:] == [((4,), True)]
    for write in list(p.transfers.writes):
        land(write, p, d)
    assert d.memory.flatten()[: len(PROMPT)].tolist() == PROMPT
    finish_writes(p)
    assert types(say(p)) == [KvClosed, PrefillDone]
    assert p.counter(Count.STEPS) == 3
    assert p.counter(Count.PREFILL_TOKENS) == len(PROMPT)


def test_a_prompt_is_done_while_the_step_after_its_last_chunk_is_under_way(
    p: PrefillBench, d: DecodeBench
) -> None:
    ask_for(p, d, SHORT)
    say(p, SHORT)
    sent = say(p, PREFILL)
    assert p.model.log == ["launch 0", "launch 1", "read 0"]
    assert types(sent) == [FirstToken, HandoffToken]
    p.server.inbox.append((d.as_peer, grant(d, 2, request_id="short")))
    p.worker._receive()
    assert offered(p) == [((0, 1), True)]
    assert p.engine.is_ahead
    assert not p.engine.computed.is_done()
    finish_writes(p)
    p.worker._receive()
    assert types(p.take_sent()) == [KvClosed, PrefillDone]
    say(p, Abort(request_id="r", attempt=1), turns=2)


def test_a_late_grant_gets_what_is_computed_while_a_later_step_is_under_way(
    p: PrefillBench, d: DecodeBench
) -> None:
    ask_for(p, d, PREFILL)
    say(p, PREFILL, turns=2)
    p.server.inbox.append((d.as_peer, grant(d)))
    p.worker._receive()
    assert p.model.log[-1] == "read 0"
    assert offered(p) == [((0, 1), True), ((2, 3), False)]
    p.model.late.popleft()()  # the card fills the blocks of the second chunk
    assert offered(p) == [((0, 1), True), ((2, 3), True)]
    say(p, turns=3)
    finish_writes(p)
    say(p)


def test_blocks_shared_with_a_step_under_way_are_sent_behind_its_fence(
    p: PrefillBench, d: DecodeBench
) -> None:
    other = msgspec.structs.replace(PREFILL, request_id="other")
    ask_for(p, d, other)
    say(p, PREFILL, other, turns=2)
    batch = p.engine.plan()
    p.worker._begin(batch)
    p.server.inbox.append((d.as_peer, grant(d, request_id="other")))
    p.worker._receive()
    assert [chunk.start for chunk in batch.chunks] == [16, 16], "both need the last two tokens"
    assert p.model.log[-1] == "read 0"
    assert offered(p) == [((0, 1), False), ((2, 3), False)]
    sent = say(p, turns=3)
    assert [m.token_id for m in sent if type(m) is FirstToken] == continuation(PROMPT, 1) * 2
    for write in list(p.transfers.writes):
        land(write, p, d)
    assert d.memory.flatten()[: len(PROMPT)].tolist() == PROMPT
    finish_writes(p)
    say(p)
    say(p, Abort(request_id="r", attempt=1))


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_the_blocks_of_an_aborted_prompt_are_free_when_no_step_writes_to_them(
    p: PrefillBench, turns: int
) -> None:
    say(p, PREFILL, turns=turns)
    p.server.inbox = []
    p.role.drop(next(iter(p.role.tasks)))
    assert len(p.role.tasks) == 0
    assert p.scheduler.blocks.num_pinned == 5, "a step under way writes to some of them"
    assert say(p) == []
    assert p.scheduler.blocks.num_pinned == 0
    steps = p.counter(Count.STEPS)
    assert say(p, turns=2) == []
    assert p.counter(Count.STEPS) == steps


def test_a_prompt_takes_the_blocks_of_an_aborted_one_only_after_its_step(p: PrefillBench) -> None:
    held = msgspec.structs.replace(PREFILL, request_id="held", token_ids=[1] * 60)
    say(p, held)
    sent = say(p, Abort(request_id="held", attempt=1), PREFILL)
    assert p.model.log == ["launch 0", "read 0"], "there was no room beside the step under way"
    sent += say(p, turns=4)
    assert [m.token_id for m in sent] == continuation(PROMPT, 1)
    say(p, Abort(request_id="r", attempt=1))


@pytest.mark.parametrize("when", ["launch", "late"])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_step_that_raises_costs_no_prompt_its_token_and_no_peer_its_blocks(
    p: PrefillBench, d: DecodeBench, when: str, turns: int
) -> None:
    ask_for(p, d, PREFILL)
    say(p, PREFILL)
    sent = say_of_d(p, d, grant(d), turns=turns)
    p.model.explodes = when
    sent += say(p, SHORT, turns=6)
    assert p.model.explodes is None, "it has raised"
    for write in list(p.transfers.writes):
        land(write, p, d)
    assert d.memory.flatten()[: len(PROMPT)].tolist() == PROMPT
    firsts = {m.request_id: m.token_id for m in sent if type(m) is FirstToken}
    assert firsts == {
        "r": continuation(PROMPT, 1)[0],
        "short": continuation(SHORT.token_ids, 1)[0],
    }
    assert not [m for m in sent if type(m) is AttemptFailed]
    finish_writes(p)
    assert types(say(p)) == [KvClosed, PrefillDone]
    say(p, Abort(request_id="short", attempt=1))


def test_a_row_that_is_not_finite_fails_alone_and_its_last_blocks_stay_here(
    p: PrefillBench, d: DecodeBench
) -> None:
    p.model.broken = {"short"}
    ask_for(p, d, SHORT)
    sent = say_of_d(p, d)
    sent += say(p, SHORT, PREFILL)
    sent += say_of_d(p, d, grant(d, 2, request_id="short"), turns=5)
    assert p.transfers.fences == [], "none of its blocks was sent"
    failed = [m for m in sent if type(m) is AttemptFailed]
    assert [(m.request_id, m.reason) for m in failed] == [("short", NOT_FINITE.reason)]
    assert [m.token_id for m in sent if type(m) is FirstToken] == continuation(PROMPT, 1)
    say(p, Abort(request_id="r", attempt=1))


def test_a_deadline_that_passes_while_the_last_chunk_is_under_way_drops_its_token(
    p: PrefillBench,
) -> None:
    say(p, PREFILL, turns=3)
    p.clock.now += 10.0
    (failed,) = say(p)
    assert (type(failed), failed.retryable) == (AttemptFailed, False)
    assert p.scheduler.blocks.num_pinned == 0
    assert say(p) == []


def test_a_worker_that_is_told_to_stop_between_two_steps_finishes_both(
    p: PrefillBench, d: DecodeBench
) -> None:
    ask_for(p, d, SHORT, PREFILL)
    say(p, SHORT)
    say(p, PREFILL)
    p.stop.since = p.clock.now
    assert not p.host.lifecycle.is_finished(num_jobs=2)
    sent = say_of_d(p, d, grant(d, 2, request_id="short"), turns=4)
    p.server.inbox.append((d.as_peer, grant(d)))
    p.worker.turn()
    for _ in range(3):
        finish_writes(p)
        p.worker.turn()
    sent += p.take_sent()
    assert [m.request_id for m in sent if type(m) is PrefillDone] == ["short", "r"]
    p.worker.run()


def test_a_prompt_whose_own_logprobs_are_wanted_waits_for_the_step_under_way(
    p: PrefillBench,
) -> None:
    sampling = msgspec.structs.replace(greedy(4), prompt_logprobs=0)
    scored = msgspec.structs.replace(SHORT, request_id="scored", sampling=sampling)
    say(p, SHORT)
    sent = say(p, scored)
    assert p.model.log == ["launch 0", "read 0"]
    assert types(sent) == [FirstToken]
    (first,) = say(p)
    assert p.model.log == ["launch 0", "read 0"], "it ran by itself"
    assert ranks_told(first.prompt_logprobs) == SHORT.token_ids[1:]
    say(p, Abort(request_id="short", attempt=1), Abort(request_id="scored", attempt=1))


def test_the_trace_has_the_time_of_each_chunk_though_its_blocks_left_before(
    p: PrefillBench, d: DecodeBench
) -> None:
    ask_for(p, d, PREFILL)
    say(p, PREFILL)
    say_of_d(p, d, grant(d), turns=3)
    finish_writes(p)
    (done,) = [m for m in say(p) if type(m) is PrefillDone]
    assert [span.num_tokens for span in done.trace.chunks] == [8, 8, 2]
    assert [write.chunk for write in done.trace.writes] == [0, 1, 2]
