"""Prompts of one moment that begin alike are computed once."""

from __future__ import annotations

import pytest

from protocol.sampling import SamplingParams
from scheduling.batch import Batch, Chunk
from scheduling.queues.shared_prompts import SharedPrompts
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.step_plan import StepPlan
from tests.unit.scheduling.test_scheduler import BLOCK, make_scheduler, make_sequence, run_step

PROMPT = list(range(5 * BLOCK + 1))


def planned(*chunks: Chunk) -> StepPlan:
    """A step with these chunks."""
    scheduler = make_scheduler()
    return StepPlan(Batch(chunks=list(chunks)), None, scheduler.config, scheduler.model)


def begun_after(scheduler: Scheduler, sequences: list[Sequence]) -> list[int]:
    """The tokens that each step computes of prompts until all have their first token."""
    for each in sequences:
        scheduler.add(each)
    sizes = []
    while any(not each.num_output for each in sequences):
        sizes.append(run_step(scheduler).num_chunk_tokens)
        assert sizes[-1], "no step is empty while a prompt waits for another one"
    return sizes


@pytest.mark.parametrize("chunk_max", [2 * BLOCK, 64])
def test_equal_prompts_are_computed_once(chunk_max: int) -> None:
    scheduler = make_scheduler(64, chunk_max_tokens=chunk_max)
    choices = [make_sequence(f"choice-{n}", PROMPT) for n in range(8)]
    sizes = begun_after(scheduler, choices)
    assert sum(sizes) == len(PROMPT) + 7, "each choice computes the last token itself"
    assert max(sizes) <= chunk_max


def test_equal_prompts_of_whole_blocks_compute_their_last_blocks_in_one_step() -> None:
    scheduler = make_scheduler(64, chunk_max_tokens=64)
    choices = [make_sequence(f"choice-{n}", PROMPT[:-1]) for n in range(8)]
    assert begun_after(scheduler, choices) == [5 * BLOCK, 7 * BLOCK]


def test_a_prompt_that_shares_little_begins_at_once() -> None:
    scheduler = make_scheduler(64, chunk_max_tokens=64)
    other = [*PROMPT[: 2 * BLOCK], *range(100, 100 + 3 * BLOCK)]
    assert begun_after(scheduler, [make_sequence("a", PROMPT), make_sequence("b", other)]) == [
        len(PROMPT) + len(other)
    ]


def test_a_prompt_that_shares_half_of_what_it_lacks_computes_the_rest() -> None:
    scheduler = make_scheduler(64, chunk_max_tokens=64)
    other = [*PROMPT[: 3 * BLOCK], *range(100, 100 + 3 * BLOCK)]
    assert begun_after(scheduler, [make_sequence("a", PROMPT), make_sequence("b", other)]) == [
        len(PROMPT),
        3 * BLOCK,
    ]


def test_a_prompt_waits_for_blocks_of_a_step_under_way() -> None:
    scheduler = make_scheduler(64, chunk_max_tokens=64)
    first, second = make_sequence("first", PROMPT), make_sequence("second", PROMPT)
    scheduler.add(first)
    batch = scheduler.schedule(0.0)
    scheduler.launched(batch)
    scheduler.add(second)
    assert scheduler.schedule(0.0).is_empty
    scheduler.landed(batch)
    scheduler.commit(batch, [7], 0.0)
    assert [chunk.num_tokens for chunk in run_step(scheduler).chunks] == [1]


def test_a_prompt_does_not_wait_for_one_that_has_left() -> None:
    scheduler = make_scheduler(64, chunk_max_tokens=64)
    first, second = make_sequence("first", PROMPT), make_sequence("second", PROMPT)
    scheduler.add(first)
    batch: Batch = scheduler.schedule(0.0)
    scheduler.launched(batch)
    scheduler.add(second)
    scheduler.finish(first)
    assert [chunk.sequence for chunk in scheduler.schedule(0.0).chunks] == [second]
    scheduler.landed(batch)


def test_a_prompt_whose_log_probabilities_are_needed_waits_for_nobody() -> None:
    scheduler = make_scheduler(64, chunk_max_tokens=64)
    sampling = SamplingParams(max_tokens=4, seed=0, prompt_logprobs=0)
    scored = make_sequence("scored", PROMPT, sampling=sampling)
    sizes = begun_after(scheduler, [make_sequence("plain", PROMPT), scored])
    assert sizes == [2 * len(PROMPT)]


def test_a_prompt_waits_for_none_that_makes_no_progress() -> None:
    first, second = make_sequence("first", PROMPT), make_sequence("second", PROMPT)
    assert not SharedPrompts(planned(), [first], False).hold_up(second)
    first.num_ahead = len(PROMPT)
    assert SharedPrompts(planned(), [first], False).hold_up(second)


def test_a_prompt_waits_for_none_of_a_lower_priority() -> None:
    chunk = Chunk(make_sequence("first", PROMPT, priority=1), 0, len(PROMPT), completes=True)
    shared = SharedPrompts(planned(chunk), [], False)
    held_up = [shared.hold_up(make_sequence(f"{n}", PROMPT, priority=n)) for n in range(3)]
    assert held_up == [True, True, False]


def test_where_layers_keep_windows_only_an_equal_prompt_waits() -> None:
    chunk = Chunk(make_sequence("first", PROMPT), 0, len(PROMPT), completes=True)
    equal = make_sequence("equal", PROMPT)
    longer = make_sequence("longer", [*PROMPT, 1])
    other = make_sequence("other", [*PROMPT[: 4 * BLOCK], *range(100, 101 + BLOCK)])
    for needs_all in (False, True):
        shared = SharedPrompts(planned(chunk), [], needs_all)
        held_up = [shared.hold_up(each) for each in (equal, longer, other)]
        assert held_up == [True, not needs_all, not needs_all]
