"""A sequence whose grammar awaits a mask is left out of steps, keeps its blocks, and holds up no
other sequence."""

from __future__ import annotations

import pytest

from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence, SequenceState
from tests.unit.held_grammar import HeldGrammar
from tests.unit.scheduling.scheduler_harness import BLOCK, make_scheduler, make_sequence, run_step


def running(scheduler: Scheduler, name: str, is_slow: bool, size: int = 5) -> Sequence:
    """A sequence with its first token."""
    grammar = HeldGrammar(is_slow=is_slow)
    sequence = make_sequence(name, list(range(size)), max_tokens=40, grammar=grammar)
    scheduler.add(sequence)
    run_step(scheduler)
    assert sequence.state is SequenceState.RUNNING
    return sequence


def grammar_of(sequence: Sequence) -> HeldGrammar:
    assert isinstance(sequence.grammar, HeldGrammar)
    return sequence.grammar


def test_it_is_left_out_until_it_has_a_mask_and_then_decodes() -> None:
    scheduler = make_scheduler()
    slow, quick = running(scheduler, "slow", True), running(scheduler, "quick", False)
    held = []
    for _ in range(6):
        batch = run_step(scheduler)
        assert batch.decodes == [quick]
        held += batch.held
    assert held == [], "the step in which `quick` got its first token held it already"
    assert slow.is_held
    blocks = list(slow.block_table)
    grammar_of(slow).give_mask()
    assert run_step(scheduler).decodes == [slow, quick]
    assert slow.num_output == 2
    assert slow.block_table[: len(blocks)] == blocks
    assert run_step(scheduler).held == [slow], "it waits again"


def test_a_held_sequence_takes_no_block_for_a_token_that_does_not_come() -> None:
    scheduler = make_scheduler()
    slow = running(scheduler, "slow", True, size=2 * BLOCK)
    before = len(slow.block_table)
    run_step(scheduler)
    assert len(slow.block_table) == before
    grammar_of(slow).give_mask()
    run_step(scheduler)
    assert len(slow.block_table) == before + 1


def test_a_held_sequence_may_be_preempted_and_is_not_admitted_without_a_mask() -> None:
    scheduler = make_scheduler(num_blocks=12)
    first = running(scheduler, "first", False, size=2 * BLOCK)
    slow = running(scheduler, "slow", True, size=2 * BLOCK)
    while slow.state is SequenceState.RUNNING:
        run_step(scheduler)
    assert slow.num_preemptions == 1
    scheduler.finish(first)
    assert run_step(scheduler).is_empty
    assert slow.state is SequenceState.WAITING
    grammar_of(slow).give_mask()
    while slow.num_output == 1:
        run_step(scheduler)


def test_the_last_chunk_of_a_prompt_waits_for_a_mask() -> None:
    scheduler = make_scheduler(chunk_max_tokens=BLOCK, chunk_min_tokens=BLOCK)
    grammar = HeldGrammar()
    sequence = make_sequence("a", list(range(2 * BLOCK)), grammar=grammar)
    scheduler.add(sequence)
    run_step(scheduler)
    grammar.awaits_mask = True
    assert run_step(scheduler).is_empty
    grammar.give_mask()
    assert run_step(scheduler).sampled == [sequence]


def test_no_prefill_is_cut_for_a_sequence_that_has_waited_for_its_mask() -> None:
    scheduler = make_scheduler(itl_target_s=0.05)
    slow = running(scheduler, "slow", True)
    scheduler.add(make_sequence("long", [9] * 64))
    (chunk,) = scheduler.schedule(10.0).chunks
    assert chunk.num_tokens > BLOCK
    grammar_of(slow).give_mask()
    batch = scheduler.schedule(10.0)
    assert batch.decodes == [slow]
    assert batch.chunks[0].num_tokens > BLOCK, "as if it had got a token just now"


@pytest.mark.parametrize("is_held", [False, True])
def test_the_grammar_of_a_sequence_that_ends_is_closed(is_held: bool) -> None:
    scheduler = make_scheduler()
    sequence = running(scheduler, "a", is_held)
    run_step(scheduler)
    assert sequence.is_held is is_held
    scheduler.finish(sequence)
    assert grammar_of(sequence).is_closed
