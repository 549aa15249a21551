"""Steps that are scheduled while others compute: tokens nobody knows yet, blocks in use."""

from __future__ import annotations

from scheduling.batch import Batch
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence, SequenceState
from tests.unit.scheduling.scheduler_harness import make_scheduler, make_sequence, run_step


def launch_two_chunks() -> tuple[Scheduler, Sequence, list[Batch]]:
    """A long prompt whose first two chunks are in steps under way."""
    scheduler = make_scheduler(chunk_max_tokens=8)
    sequence = make_sequence("long", list(range(30)))
    scheduler.add(sequence)
    steps = []
    for _ in range(2):
        steps.append(scheduler.schedule(0.0))
        scheduler.launched(steps[-1])
    return scheduler, sequence, steps


def test_a_chunk_that_gives_no_token_is_computed_once_it_is_launched() -> None:
    scheduler = make_scheduler(chunk_max_tokens=8)
    first = make_sequence("first", list(range(18)), prefill_only=True)
    scheduler.add(first)
    for end in (8, 16):
        scheduler.launched(scheduler.schedule(0.0))
        assert (first.num_computed, first.num_ahead) == (end, 0)
    other = make_sequence("other", list(range(18)), prefill_only=True)
    scheduler.add(other)
    last = scheduler.schedule(0.0)
    assert [(chunk.start, chunk.completes) for chunk in last.chunks] == [(16, True), (16, True)]
    assert other.block_table[:4] == first.block_table[:4], "it shares what is under way"
    scheduler.launched(last)
    assert (first.num_computed, first.num_ahead, first.state) == (16, 2, SequenceState.PREFILLING)
    assert scheduler.schedule(0.0).is_empty, "nobody knows their tokens"
    scheduler.landed(last)
    produced = scheduler.commit(last, [7, 7], 0.0)
    assert [each.sequence for each in produced] == [first, other]
    assert (first.num_computed, first.num_ahead) == (18, 0)


def test_a_step_that_ends_sets_no_prompt_back_that_a_later_one_has_taken_on() -> None:
    scheduler, sequence, steps = launch_two_chunks()
    scheduler.landed(steps[0])
    scheduler.commit(steps[0], [], 0.0)
    assert sequence.num_computed == 16


def test_blocks_are_released_when_the_last_step_that_uses_them_has_landed() -> None:
    scheduler, sequence, steps = launch_two_chunks()
    scheduler.finish(sequence)
    assert scheduler.blocks.num_pinned == 8
    scheduler.landed(steps[0])
    assert scheduler.blocks.num_pinned == 8
    scheduler.landed(steps[1])
    assert scheduler.blocks.num_pinned == 0


def test_a_prompt_in_the_step_under_way_is_not_preempted() -> None:
    scheduler = make_scheduler(num_blocks=9, chunk_max_tokens=8, headroom_per_sequence=0)
    running = make_sequence("running", list(range(10)), max_tokens=20)
    scheduler.add(running)
    run_step(scheduler)
    run_step(scheduler)
    young = make_sequence("young", [50 + i for i in range(24)])
    scheduler.add(young)
    run_step(scheduler)
    assert (running.num_tokens, scheduler.blocks.num_free) == (12, 0)
    batch = scheduler.schedule(0.0)
    assert [(c.sequence, c.completes) for c in batch.chunks] == [(young, False)]
    scheduler.launched(batch)
    blocked = scheduler.schedule(0.0)
    assert blocked.is_empty
    assert (blocked.preempted, young.num_computed) == ([], 16)
    scheduler.landed(batch)
    scheduler.commit(batch, [7], 0.0)
    assert scheduler.schedule(0.0).preempted == [young]
    assert (young.num_computed, young.num_steps) == (0, 0)
