"""Layers that keep a state: a step reads the state of exactly the tokens before it and writes where
nobody reads, whatever is shared, dropped, preempted and evicted; and nothing that has begun waits
for memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ConfigError
from protocol.layout import KvGroup, KvLayout
from scheduling.batch import Batch
from scheduling.block_pools import BlockPools
from scheduling.scheduler import Scheduler, SchedulerConfig
from scheduling.sequence import Sequence, SequenceState
from scheduling.step_model import StepModel
from tests.effort import times
from tests.unit.scheduling.scheduler_harness import BLOCK, make_sequence

STATES = 1
"""The number of the group with states."""
IN_A_PAGE = 4


def layout_of(state_numbers: int = 100) -> KvLayout:
    """A layer with keys and values, 256 bytes a block, and two with states."""
    return KvLayout(
        model_fingerprint="x",
        dtype="float32",
        num_layers=1,
        num_kv_heads=1,
        block_size=BLOCK,
        head_dim=256 // (2 * BLOCK * 4),
        grouping=(KvGroup((0,)), KvGroup((1, 2), 2, state_numbers)),
    )


class Slots:
    """A scheduler and what a model would keep in its slots: the tokens that each state has seen."""

    def __init__(self, num_pages: int, chunk: int = 16) -> None:
        config = SchedulerConfig(BLOCK, 8, BLOCK, chunk)
        pools = BlockPools.of(layout_of(), num_pages)
        self.scheduler = Scheduler(config, pools, StepModel(0.001, 0.001, 0.0))
        self.manager = pools.managers[STATES]
        self.seen: dict[int, tuple[int, ...]] = {}

    def compute(self, batch: Batch) -> None:
        """What a step does to the slots; it may be done twice, or in vain."""
        reads, writes = set(), set()
        tables = [each.tables[STATES].blocks for each in self.scheduler.sequences]
        for sequence in batch.sequences:
            step = sequence.state_step
            assert step is not None
            known = tuple(sequence.tokens[: step.start])
            assert (step.read is None) == (step.start == 0)
            if step.read is not None:
                assert self.seen[step.read] == known, "another state, or one that is gone"
                reads.add(step.read)
            for _, slot in step.writes:
                assert self.manager.is_pinned(slot)
                assert not self.manager.is_hashed(slot), "a cached state is never written again"
                assert sum(slot in table for table in tables) == 1, "others hold it, too"
                assert slot not in writes, "two steps write to one slot"
                writes.add(slot)
        assert not reads & writes
        for sequence in batch.sequences:
            step = sequence.state_step
            for num_tokens, slot in step.writes:
                self.seen[slot] = tuple(sequence.tokens[: step.start + num_tokens])

    def commit(self, batch: Batch) -> None:
        self.scheduler.commit(batch, [0] * len(batch.sampled), 0.0)
        self.check()

    def check(self) -> None:
        """Tables hold as many slots as the rule says."""
        self.scheduler.pools.check()
        for sequence in self.scheduler.sequences:
            assert len(sequence.tables[STATES].blocks) <= 4


@settings(deadline=None, max_examples=times(12, nightly=500))
@given(st.integers(6, 40), st.sampled_from([4, 16, 64]), st.data())
def test_each_step_reads_the_state_of_the_tokens_before_it(
    num_pages: int, chunk: int, data: st.DataObject
) -> None:
    """Prompts over few tokens share prefixes; some end here and keep their blocks for a while, some
    are given up; some steps are dropped after they were computed, and computed again."""
    slots = Slots(num_pages, chunk)
    scheduler = slots.scheduler
    kept: list[Sequence] = []
    left = data.draw(st.integers(1, 8))
    for number in range(3000):
        if left and not data.draw(st.booleans()):
            left -= 1
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=60))
            prefill_only = data.draw(st.booleans())
            most = data.draw(st.integers(1, 20))
            sequence = make_sequence(str(number), prompt, most, prefill_only=prefill_only)
            try:
                scheduler.add(sequence)
            except ValueError:
                continue
            kept += [sequence] if prefill_only else []
        batch = scheduler.schedule(0.0)
        slots.check()
        slots.compute(batch)
        if data.draw(st.integers(0, 5)) < 5:
            slots.commit(batch)
        elif scheduler.sequences and data.draw(st.booleans()):
            given_up = scheduler.sequences[0]
            if data.draw(st.booleans()):
                scheduler.withdraw(given_up)
            scheduler.finish(given_up)
            kept = [each for each in kept if each is not given_up]
        done = [each for each in kept if each.state is SequenceState.FINISHED]
        idle = batch.is_empty and not batch.preempted
        if done and (idle or data.draw(st.booleans())):
            kept.remove(done[0])
            scheduler.release_blocks(done[0])
        elif idle and not left:
            assert not scheduler.sequences, "something waits, and nothing will wake it"
            break
    slots.check()
    assert scheduler.blocks_used == 0


def run(slots: Slots, prompt: list[int], most: int = 1) -> Sequence:
    sequence = make_sequence(f"{len(prompt)} {most} {hash(tuple(prompt))}", prompt, most)
    slots.scheduler.add(sequence)
    while slots.scheduler.has_work:
        batch = slots.scheduler.schedule(0.0)
        slots.compute(batch)
        slots.commit(batch)
    return sequence


def test_a_state_that_is_shared_but_cached_no_more_is_not_written() -> None:
    slots = Slots(40)
    scheduler = slots.scheduler
    beginning = [1] * (2 * BLOCK)
    run(slots, [*beginning, 2])
    three = [make_sequence(str(tail), [*beginning, tail], 3 * BLOCK) for tail in (3, 4, 5)]
    for each in three:
        scheduler.add(each)
    batch = scheduler.schedule(0.0)
    assert sorted(map(id, batch.sequences)) == sorted(map(id, three))
    slots.compute(batch)
    slots.commit(batch)
    scheduler.withdraw(three[0])
    scheduler.finish(three[0])
    while scheduler.has_work:
        batch = scheduler.schedule(0.0)
        slots.compute(batch)
        slots.commit(batch)
    assert scheduler.blocks_used == 0


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 3])
def test_a_prompt_that_comes_again_is_computed_from_its_last_boundary_on(length: int) -> None:
    slots, prompt = Slots(40), list(range(length))
    run(slots, prompt)
    assert run(slots, prompt, 2).num_cached == (length - 1) // BLOCK * BLOCK
    assert run(slots, [*prompt, 1, 2, 3], 2).num_cached >= (length - 1) // BLOCK * BLOCK


def test_a_sequence_holds_three_states_however_long_it_becomes() -> None:
    slots = Slots(40)
    sequence = make_sequence("r", list(range(50)), 60)
    slots.scheduler.add(sequence)
    held = set()
    while slots.scheduler.has_work:
        batch = slots.scheduler.schedule(0.0)
        slots.compute(batch)
        slots.commit(batch)
        if batch.decodes and sequence.tables[STATES].blocks:
            held.add(len(sequence.tables[STATES].blocks))
    assert held == {3}


def test_old_states_of_an_answer_go_before_those_of_prompts() -> None:
    """A long answer leaves states at each boundary that it crossed; memory is taken from them."""
    slots = Slots(16)
    first = run(slots, list(range(21)), 2)
    run(slots, list(range(100, 110)), 90)
    assert run(slots, first.tokens[:21], 2).num_cached == 20


def test_layouts_with_other_states_are_not_one_cache() -> None:
    one, other = layout_of(100), layout_of(101)
    assert one.description == "1 layers without a window and 2 layers with states of 100 numbers"
    assert one.fingerprint != other.fingerprint
    assert one.page_bytes == 1024 == IN_A_PAGE * one.of_group(0).block_bytes
    assert (one.blocks_per_page(0), one.blocks_per_page(STATES)) == (IN_A_PAGE, 1)
    assert one.of_group(STATES).block_bytes == 2 * 100 * 4
    with pytest.raises(ConfigError, match="100 numbers in 1 parts cannot be split over 2"):
        one.shard(0, 2)
