"""Who follows a grammar, and who waits for it: itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.model_runner import ModelRunner
from engine.runner import LATE, TOO_SLOW, RowFailure, SampledToken
from engine.sampling.grammar import Grammars
from engine.sampling.grammar_matcher import GrammarLimits, GrammarMatcher, TokenMask
from engine.sampling.sampler import Sampler
from protocol.messages import FinishReason
from tests.paths import DEMO_MODEL
from tests.unit.engine.test_engine import VOCAB as MODELS
from tests.unit.engine.test_engine import NotedAttention, Rig, ScriptedModel
from tests.unit.slow_grammars import ambiguous_grammar

TOKENIZER = DEMO_MODEL / "tokenizer.json"
VOCAB, END = 2048, 2047
TOKENS = LLTokenizer(str(TOKENIZER))
ANY = "start: /(.|\\n)*/"
(A,) = TOKENS.tokenize_str("a")
LONG_S = 60.0
PATIENT = GrammarLimits(step_s=LONG_S)
IMPATIENT = GrammarLimits(step_s=0.02)


class Gate:
    """Holds up the consuming of tokens in the pool, for the matchers that were `shut` out."""

    def __init__(self, grammars: Grammars) -> None:
        self.opened = threading.Event()
        self.states: list[Any] = []
        self._consume = grammars.follower.consume
        grammars.follower.consume = self.consume  # type: ignore[method-assign]

    def shut(self, matcher: GrammarMatcher) -> None:
        self.states.append(matcher.state)

    def consume(self, chosen: list[Any]) -> None:
        if any(state is each for state, _ in chosen for each in self.states):
            assert self.opened.wait(LONG_S)
        self._consume(chosen)


Make = Callable[[GrammarLimits], Grammars]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Grammars] = []

    def grammars(limits: GrammarLimits) -> Grammars:
        made.append(Grammars(TOKENIZER, VOCAB, (END,), limits))
        return made[-1]

    yield grammars
    for each in made:
        each.close()


def ready(grammars: Grammars, grammar: str, request: str = "") -> GrammarMatcher:
    matcher = grammars.matcher(grammar, [], request)
    matcher.wait()
    return matcher


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def trust(matcher: GrammarMatcher) -> None:
    matcher.lane.num_quick = 99


def runner_of(grammars: Grammars) -> ModelRunner:
    model: Any = ScriptedModel()
    attention: Any = NotedAttention()
    return ModelRunner(model, attention, Sampler(MODELS), grammars)


def test_a_grammar_is_followed_by_threads_until_it_has_been_quick_for_a_while(make: Make) -> None:
    grammars = make(PATIENT)
    matcher = ready(grammars, ANY)
    kinds: list[bool] = []
    while not any(kinds):
        assert len(kinds) < 5000, "it was never quick eight times in a row"
        matcher.advance(A)
        kinds.append(matcher.is_deferred)
        grammars.follower.wait_for_masks([matcher])
        assert not matcher.is_pending
    assert len(kinds) > 8
    assert A in np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little"))  # type: ignore[union-attr]


def test_other_sequences_go_on_step_by_step_while_a_mask_is_computed(make: Make) -> None:
    grammars = make(IMPATIENT)
    rig = Rig()
    rig.engine._runner = runner_of(grammars)
    gate = Gate(grammars)
    slow, free = rig.add("slow", 6, 2), rig.add("free", 14, 2)
    for sequence in (slow, free):
        sequence.sampling = msgspec.structs.replace(sequence.sampling, max_tokens=20)
    matcher = ready(grammars, 'start: ")"+')
    slow.grammar = matcher
    gate.shut(matcher)
    woken = threading.Event()
    grammars.wake = woken.set
    rig.engine.run(rig.engine.plan())
    assert (slow.num_output, free.num_output) == (1, 1)
    held = []
    for _ in range(7):
        batch = rig.engine.plan()
        held += batch.held
        assert batch.decodes == [free]
        rig.engine.run(batch)
    assert (slow.num_output, free.num_output) == (1, 8)
    assert held == [slow], "counted once"
    assert slow.block_table, "it keeps its blocks"
    assert not woken.is_set()
    gate.opened.set()
    assert woken.wait(LONG_S)
    wait_until(lambda: not matcher.is_pending)
    rig.engine.run(rig.engine.plan())
    assert (slow.num_output, free.num_output) == (2, 9)


def test_a_mask_that_is_late_though_expected_costs_its_own_row_only(make: Make) -> None:
    grammars = make(IMPATIENT)
    rig = Rig()
    rig.engine._runner = runner = runner_of(grammars)
    slow, free = rig.add("slow", 6, 2), rig.add("free", 14, 2)
    matcher = ready(grammars, 'start: ")"+')
    slow.grammar = matcher
    rig.engine.run(rig.engine.plan())
    wait_until(lambda: not matcher.is_pending)
    batch = rig.engine.plan()
    assert batch.decodes == [slow, free]
    matcher.is_pending = True  # as if it had been expected
    logits, _ = runner.launch(batch)
    assert runner.sample(batch, logits)[0] == LATE
    result = rig.engine.run(batch)
    assert result.batch.decodes == [free]
    assert result.failed == []
    assert (slow.num_output, slow.num_computed, free.num_output) == (1, 2, 2)
    matcher.is_pending = False
    rig.engine.run(rig.engine.plan())
    assert (slow.num_output, slow.num_computed) == (2, 3)


def test_all_sequences_of_a_request_whose_masks_take_too_long_end_and_no_other(make: Make) -> None:
    grammars = make(GrammarLimits(step_s=LONG_S, request_s=0.05))
    rig = Rig()
    rig.engine._runner = runner_of(grammars)
    request = {name: rig.add(name, 6, 2) for name in ("r-0", "r-1", "s-0")}
    matchers = {name: ready(grammars, 'start: ")"+', name[0]) for name in request}
    for name, sequence in request.items():
        sequence.grammar = matchers[name]
    assert matchers["r-0"].time is matchers["r-1"].time is not matchers["s-0"].time
    rig.engine.run(rig.engine.plan())
    matchers["r-0"].time.add(1.0)
    result = rig.engine.run(rig.engine.plan())
    assert [(s.request_id, row) for s, row in result.failed] == [
        ("r-0", TOO_SLOW),
        ("r-1", TOO_SLOW),
    ]
    assert [p.sequence.request_id for p in result.produced] == ["s-0"]


def test_the_time_of_a_token_counts_but_for_a_little(make: Make) -> None:
    grammars = make(PATIENT)
    matcher = ready(grammars, ambiguous_grammar(150))
    begun_s = matcher.time.used_s
    assert begun_s > 0.0, "so does the first mask"
    matcher.advance(A)
    grammars.follower.wait_for_masks([matcher])
    assert matcher.time.used_s > begun_s
    assert matcher.lane.num_quick == 0
    spent = matcher.time.used_s
    matcher.time.add(PATIENT.free_s)
    assert matcher.time.used_s == spent


def test_the_interpreter_does_not_wait_for_a_token_that_is_consumed(make: Make) -> None:
    """A turn of the loop takes 1 ms and the token 100 ms, if this thread gets a core."""
    grammars = make(PATIENT)
    matcher = ready(grammars, ambiguous_grammar())

    def turns_while_a_token_is_consumed() -> int:
        state = matcher.state.deep_copy()
        begun, done = threading.Event(), threading.Event()

        def consume() -> None:
            grammars.follower.consume([])
            begun.set()
            grammars.follower.consume([(state, A)])
            done.set()

        thread = threading.Thread(target=consume)
        thread.start()
        assert begun.wait(LONG_S)
        turns = 0
        while not done.wait(0.001):
            turns += 1
        thread.join()
        return turns

    wait_until(lambda: turns_while_a_token_is_consumed() >= 10)


def test_a_grammar_that_betrays_trust_is_followed_by_threads_and_so_are_all_others(
    make: Make,
) -> None:
    grammars = make(GrammarLimits(step_s=0.002))
    slow = [ready(grammars, ambiguous_grammar(150)) for _ in range(3)]
    other = ready(grammars, ANY)
    hold = hold_masks(grammars)
    for matcher in (slow[0], other):
        trust(matcher)
    grammars.follower.give([(matcher, A) for matcher in slow])
    assert slow[0].is_deferred
    assert not slow[1].is_deferred, "after the first one the others are given to threads"
    assert slow[0].awaits_mask, "its mask is computed by threads, too"
    assert not slow[0].is_deferred
    other.advance(A)
    assert not other.is_deferred
    hold.set()
    wait_until(lambda: not any(matcher.is_pending for matcher in slow))
    assert all(matcher.mask is not None for matcher in slow)


def hold_masks(grammars: Grammars) -> threading.Event:
    """Masks are computed once the event is set."""
    opened, mask_of = threading.Event(), grammars.follower.mask_of

    def held(state: LLMatcher) -> TokenMask | None:
        assert opened.wait(LONG_S)
        return mask_of(state)

    grammars.follower.mask_of = held  # type: ignore[method-assign]
    return opened


def test_a_deferred_mask_is_computed_where_it_is_needed(make: Make) -> None:
    grammars = make(PATIENT)
    matchers = [ready(grammars, ANY) for _ in range(12)]
    for count in (3, 12):
        trust(matchers[0])
        grammars.follower.give([(matcher, A) for matcher in matchers[:count]])
        assert all(matcher.is_deferred for matcher in matchers[:count])
        assert not any(matcher.awaits_mask for matcher in matchers)
        grammars.follower.wait_for_masks(matchers[:count])
        assert not any(matcher.is_pending for matcher in matchers)
    fresh = ready(grammars, ANY)
    fresh.advance(A)
    grammars.follower.wait_for_masks([fresh])
    masks = [matcher.mask for matcher in [*matchers, fresh] if matcher.mask is not None]
    assert len({mask.tobytes() for mask in masks}) == 1
    assert len(masks) == 13


def test_an_output_whose_end_was_noticed_late_ends_with_the_end_of_the_text(make: Make) -> None:
    grammars = make(IMPATIENT)
    matcher = ready(grammars, 'start: "a"')
    gate = Gate(grammars)
    gate.shut(matcher)
    assert not matcher.advance(A), "nobody knows yet that the grammar is complete"
    gate.opened.set()
    wait_until(lambda: not matcher.is_pending)
    allowed = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")  # type: ignore[union-attr]
    assert np.flatnonzero(allowed).tolist() == [END]
    trust(matcher)  # so that this thread consumes it, whatever the others do
    assert matcher.advance(END)


def test_no_mask_is_computed_for_a_sequence_that_has_ended(make: Make) -> None:
    grammars = make(IMPATIENT)
    rig = Rig()
    rig.engine._runner = runner_of(grammars)
    bound = rig.add("bound", 6, 2)
    bound.sampling = msgspec.structs.replace(bound.sampling, max_tokens=1)
    matcher = ready(grammars, 'start: ")"+')
    bound.grammar = matcher
    gate = Gate(grammars)
    gate.shut(matcher)
    result = rig.engine.run(rig.engine.plan())
    assert result.produced[0].finish is FinishReason.LENGTH
    gate.opened.set()
    wait_until(lambda: not matcher.is_pending)
    assert matcher.mask is None


def test_a_fault_in_a_thread_fails_its_sequences_and_leaves_the_thread(make: Make) -> None:
    grammars = make(PATIENT)
    matcher, other = ready(grammars, ANY), ready(grammars, ANY)
    consume = grammars.follower.consume

    def fail(chosen: list[Any]) -> None:
        if chosen[0][0] is matcher.state:
            raise RuntimeError("broken")
        consume(chosen)

    grammars.follower.consume = fail  # type: ignore[method-assign]
    for each in (matcher, other):
        each.advance(A)
        grammars.follower.wait_for_masks([each])
    assert matcher.error == "RuntimeError on the worker"
    assert matcher.mask is None
    assert other.mask is not None


def test_a_grammar_that_fails_is_the_requests_fault(make: Make) -> None:
    grammars = make(PATIENT)
    rig = Rig()
    bound = rig.add("bound", 6, 2)
    bound.grammar = ready(grammars, "nothing")
    runner = runner_of(grammars)
    batch = rig.engine.plan()
    logits, _ = runner.launch(batch)
    (row,) = runner.sample(batch, logits)
    assert isinstance(row, RowFailure)
    assert row.code == "grammar_failed"
    assert not isinstance(row, SampledToken)
