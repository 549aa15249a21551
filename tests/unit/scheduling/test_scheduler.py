"""The scheduler's promises: chunks, budgets, priorities, preemption, deadlines."""

from __future__ import annotations

import random

import pytest

from protocol.sampling import SamplingParams
from scheduling.batch import Batch, Chunk
from scheduling.scheduler import SchedulerConfig
from scheduling.sequence import Sequence, SequenceState
from scheduling.step_model import StepCost
from tests.unit.scheduling.scheduler_harness import (
    BLOCK,
    drain,
    make_scheduler,
    make_sequence,
    run_step,
)


def test_a_prompt_is_prefilled_in_whole_blocks_then_decoded() -> None:
    scheduler = make_scheduler(chunk_max_tokens=10)
    sequence = make_sequence("a", list(range(19)), max_tokens=3)
    scheduler.add(sequence)
    sizes = []
    while scheduler.has_work:
        batch = run_step(scheduler)
        sizes.append((len(batch.decodes), [c.num_tokens for c in batch.chunks]))
    assert sizes == [(0, [8]), (0, [8]), (0, [3]), (1, []), (1, [])]
    assert sequence.tokens[19:] == [7, 7, 7]
    assert scheduler.blocks.num_pinned == 0


def test_decodes_come_in_every_step_while_a_long_prompt_is_prefilled() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("running", [1, 2, 3], max_tokens=30))
    run_step(scheduler)
    scheduler.add(make_sequence("long", list(range(100, 160)), max_tokens=1))
    while scheduler.find(("long", 0)):
        assert len(run_step(scheduler).decodes) == 1


def test_the_budget_is_the_slack_of_the_running_requests() -> None:
    scheduler = make_scheduler(chunk_max_tokens=64, itl_target_s=0.014)
    scheduler.add(make_sequence("running", [1, 2, 3], max_tokens=30))
    run_step(scheduler, now=0.0)
    scheduler.add(make_sequence("long", list(range(100, 160)), max_tokens=1))
    # 1 ms fixed + 1 ms for the decode leave 12 ms, and a token takes one.
    assert [c.num_tokens for c in run_step(scheduler, now=0.0).chunks] == [12]
    # 7 ms of the 14 are gone: 5 tokens fit, which is one block.
    assert [c.num_tokens for c in run_step(scheduler, now=0.007).chunks] == [4]
    # All is gone: the floor holds.
    assert [c.num_tokens for c in run_step(scheduler, now=1.0).chunks] == [BLOCK]


def test_a_step_costs_what_all_its_parts_do() -> None:
    running, prompt = make_sequence("running", [1, 2, 3]), make_sequence("prompt", list(range(20)))
    running.num_computed = 3
    batch = Batch(decodes=[running], chunks=[Chunk(prompt, 8, 5, completes=False)])
    assert batch.cost == StepCost(1 + 5, 4 + (9 + 10 + 11 + 12 + 13))


def test_a_cached_prefix_is_not_computed_again() -> None:
    scheduler = make_scheduler()
    prompt = list(range(16))
    scheduler.add(make_sequence("first", prompt, max_tokens=1))
    drain(scheduler)
    again = make_sequence("again", [*prompt, 50, 51], max_tokens=1)
    scheduler.add(again)
    batch = run_step(scheduler)
    assert [(c.start, c.num_tokens) for c in batch.chunks] == [(16, 2)]
    same = make_sequence("same", prompt, max_tokens=1)
    scheduler.add(same)
    # At least one token is computed, for its logits: so the last block is computed again.
    assert [(c.start, c.num_tokens) for c in run_step(scheduler).chunks] == [(12, 4)]


def test_a_remote_sequence_gets_all_blocks_it_lacks_and_joins_when_they_arrive() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("r", list(range(9)), max_tokens=3, remote=True, source_has_begun=True)
    scheduler.add(sequence)
    batch = run_step(scheduler)
    assert batch.received == [sequence]
    assert batch.is_empty
    assert len(sequence.block_table) == 3
    produced = scheduler.arrived(sequence, 42, now=0.0)
    assert (produced.index, produced.token_id, produced.finish) == (0, 42, None)
    assert sequence.state is SequenceState.RUNNING
    drain(scheduler)
    assert sequence.tokens[9:] == [42, 7, 7]
    assert scheduler.blocks.match(sequence.hashes[:2]) != []


def test_the_youngest_of_the_lowest_priority_is_preempted_and_resumes() -> None:
    scheduler = make_scheduler(num_blocks=6, headroom_per_sequence=0)
    old = make_sequence("old", [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=12)
    young = make_sequence("young", [11, 12, 13, 14, 15, 16, 17, 18], max_tokens=12)
    scheduler.add(old)
    scheduler.add(young)
    preempted: list[Sequence] = []
    for _ in range(200):
        if not scheduler.has_work:
            break
        preempted += run_step(scheduler).preempted
        scheduler.blocks.check()
    assert young in preempted
    assert old not in preempted
    assert len(old.tokens) == len(young.tokens) == 20
    assert scheduler.blocks.num_pinned == 0


@pytest.mark.parametrize(("before", "victim"), [(2, "young"), (3, "old")])
def test_a_sequence_that_was_preempted_three_times_is_spared(before: int, victim: str) -> None:
    scheduler = make_scheduler(num_blocks=6, headroom_per_sequence=0)
    old = make_sequence("old", list(range(8)), max_tokens=12)
    young = make_sequence("young", list(range(20, 28)), max_tokens=12)
    for each in (old, young):
        scheduler.add(each)
    run_step(scheduler)
    young.num_preemptions = before
    preempted: list[Sequence] = []
    while not preempted:
        preempted += run_step(scheduler).preempted
    assert [each.request_id for each in preempted] == [victim]


def test_priorities_decide_who_is_admitted_and_age_overrules_them() -> None:
    scheduler = make_scheduler(max_batch_size=1, aging_s=10.0)
    scheduler.add(make_sequence("low", [1, 2, 3], max_tokens=1, priority=0))
    scheduler.add(make_sequence("high", [4, 5, 6], max_tokens=1, priority=1, arrival=5.0))
    assert [c.sequence.request_id for c in run_step(scheduler, now=6.0).chunks] == ["high"]
    scheduler.add(make_sequence("high2", [4, 5, 9], max_tokens=1, priority=1, arrival=11.0))
    assert [c.sequence.request_id for c in run_step(scheduler, now=11.0).chunks] == ["low"]


def test_a_sequence_whose_blocks_a_peer_reads_is_never_preempted() -> None:
    """Not even if it is the least senior."""
    scheduler = make_scheduler(num_blocks=8, max_batch_size=4)
    old = make_sequence("old", list(range(7)), max_tokens=20)
    young = make_sequence("young", list(range(100, 107)), max_tokens=20)
    read = make_sequence("read", list(range(50, 58)), prefill_only=True, priority=-9)
    for sequence in (old, young):
        scheduler.add(sequence)
    run_step(scheduler)
    scheduler.add(read)
    for _ in range(8):
        scheduler.schedule(0.0)  # the prompt is never computed: its chunks are dropped
        batch = Batch(decodes=[s for s in (old, young) if s.state is SequenceState.RUNNING])
        scheduler.commit(batch, [7] * len(batch.sampled), 0.0)
    assert read.state is SequenceState.PREFILLING
    assert young.num_preemptions > 0


def test_deadlines_end_a_sequence_in_every_state() -> None:
    scheduler = make_scheduler(num_blocks=8, max_batch_size=3)
    states = {
        "running": make_sequence("running", [1], max_tokens=9, deadline=5.0),
        "receiving": make_sequence(
            "receiving", [2], remote=True, source_has_begun=True, deadline=5.0
        ),
        "prefilling": make_sequence("prefilling", list(range(20)), deadline=5.0),
        "waiting": make_sequence("waiting", [3], deadline=5.0),
    }
    for sequence in states.values():
        scheduler.add(sequence)
    run_step(scheduler)
    assert {name: str(s.state) for name, s in states.items()} == {n: n for n in states}
    batch = scheduler.schedule(5.0)
    assert set(batch.expired) == set(states.values())
    assert scheduler.sequences == []
    # The receiving one's blocks may still be written to: its owner releases them.
    scheduler.release_blocks(states["receiving"])
    assert scheduler.blocks.num_pinned == 0


def test_what_can_never_fit_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=2)
    with pytest.raises(ValueError, match="9 tokens need 3 blocks, the pool has 2"):
        scheduler.add(make_sequence("big", [1, 2, 3, 4, 5], max_tokens=4))


def test_chunk_limits_below_a_block_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk_min_tokens"):
        SchedulerConfig(block_size=16, chunk_min_tokens=8)


def test_no_sequence_starves_under_constant_pressure_of_higher_priority() -> None:
    rng = random.Random(1)
    scheduler = make_scheduler(num_blocks=10, max_batch_size=2, aging_s=1.0)
    low = make_sequence("low", list(range(20)), max_tokens=8)
    scheduler.add(low)
    for step in range(2000):
        now = step * 0.1
        if scheduler.num_waiting < 4:
            prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 12))]
            scheduler.add(
                make_sequence(f"high{step}", prompt, max_tokens=6, priority=5, arrival=now)
            )
        run_step(scheduler, now)
        if low.state is SequenceState.FINISHED:
            break
    assert low.num_output == 8


def test_no_local_prompt_overtakes_one_that_finds_no_budget() -> None:
    scheduler = make_scheduler(chunk_max_tokens=16)
    scheduler.add(make_sequence("first", list(range(14))))
    scheduler.add(make_sequence("long", list(range(100, 120))))
    scheduler.add(make_sequence("short", [1]))  # would fit into the two tokens that are left
    scheduler.add(make_sequence("remote", [2, 3], remote=True, source_has_begun=True))
    batch = scheduler.schedule(0.0)
    assert [chunk.sequence.request_id for chunk in batch.chunks] == ["first"]
    assert [sequence.request_id for sequence in batch.received] == ["remote"]


def scored(name: str, prompt: list[int], **fields: object) -> Sequence:
    sampling = SamplingParams(max_tokens=4, seed=0, prompt_logprobs=0)
    return make_sequence(name, prompt, **{"sampling": sampling, **fields})


def test_a_prompt_whose_own_logprobs_are_wanted_is_computed_whole_and_cached_for_others() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("warms", list(range(12))))
    drain(scheduler)
    scheduler.add(scored("scored", list(range(14))))
    [chunk] = run_step(scheduler).chunks
    assert (chunk.start, chunk.num_tokens) == (0, 14)
    drain(scheduler)
    scheduler.add(make_sequence("other", list(range(14))))
    [chunk] = run_step(scheduler).chunks
    assert chunk.start == 12
    drain(scheduler)
    scheduler.blocks.check()


def test_once_the_prompt_was_told_of_its_blocks_may_be_cached() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("warms", list(range(12))))
    drain(scheduler)
    for sequence in (
        scored(
            "again", list(range(14)), num_prompt=13
        ),  # its first token came in an attempt before
        scored("remote", list(range(14)), remote=True, source_has_begun=True),
    ):
        scheduler.add(sequence)
        run_step(scheduler)
        assert sequence.num_cached == 12
        scheduler.finish(sequence)
