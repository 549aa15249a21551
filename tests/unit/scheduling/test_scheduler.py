"""The scheduler's promises, by example and by random histories (hypothesis state machine)."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.hashing import chain_root
from protocol.sampling import SamplingParams
from scheduling.batch import Batch, Chunk
from scheduling.block_manager import BlockManager
from scheduling.scheduler import Scheduler, SchedulerConfig
from scheduling.sequence import Sequence, SequenceState
from scheduling.step_model import StepCost, StepModel
from tests.effort import times

BLOCK = 4
ROOT = chain_root("model")


def make_scheduler(num_blocks: int = 32, **config: object) -> Scheduler:
    defaults: dict[str, object] = {
        "block_size": BLOCK,
        "max_batch_size": 8,
        "chunk_min_tokens": BLOCK,
        "chunk_max_tokens": 16,
        "itl_target_s": 0.05,
    }
    return Scheduler(
        SchedulerConfig(**{**defaults, **config}),  # type: ignore[arg-type]
        BlockManager(num_blocks),
        StepModel(fixed_s=0.001, per_token_s=0.001, per_attended_s=0.0),
    )


def make_sequence(name: str, prompt: list[int], max_tokens: int = 4, **fields: object) -> Sequence:
    values: dict[str, object] = {
        "request_id": name,
        "attempt": 0,
        "tokens": list(prompt),
        "num_prompt": len(prompt),
        "sampling": SamplingParams(max_tokens=max_tokens, seed=0),
        "root_hash": ROOT,
        "block_size": BLOCK,
        "arrival": 0.0,
        "deadline": 1e9,
    }
    return Sequence(**{**values, **fields})  # type: ignore[arg-type]


def run_step(scheduler: Scheduler, now: float = 0.0, token: int = 7) -> Batch:
    batch = scheduler.schedule(now)
    scheduler.commit(batch, [token] * len(batch.sampled), now)
    return batch


def drain(scheduler: Scheduler, steps: int = 1000) -> None:
    for _ in range(steps):
        if not scheduler.has_work:
            return
        run_step(scheduler)
    raise AssertionError("the scheduler did not come to an end")


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


class SchedulerHistory(RuleBasedStateMachine):
    """Random arrivals, steps, peers' deliveries and aborts; nothing may be lost or owned twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(num_blocks=12, max_batch_size=4, aging_s=20.0)
        self.now = 0.0
        self.alive: dict[str, Sequence] = {}
        self.held: list[Sequence] = []
        self.count = 0

    @rule(
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 12),
        prefix=st.integers(0, 2),
        priority=st.integers(0, 2),
        remote=st.booleans(),
        has_begun=st.booleans(),
        lifetime=st.sampled_from([3.0, 1e9]),
    )
    def arrive(self, **draw: int | bool | float) -> None:
        self.count += 1
        length, prefix = int(draw["length"]), int(draw["prefix"])
        sequence = make_sequence(
            f"s{self.count}",
            [prefix * 1000 + i for i in range(length)],
            max_tokens=int(draw["max_tokens"]),
            priority=int(draw["priority"]),
            remote=bool(draw["remote"]),
            source_has_begun=bool(draw["has_begun"]),
            arrival=self.now,
            deadline=self.now + float(draw["lifetime"]),
        )
        if sequence.blocks_for(length + int(draw["max_tokens"])) > 12:
            with pytest.raises(ValueError, match="the pool has"):
                self.scheduler.add(sequence)
            return
        self.scheduler.add(sequence)
        self.alive[sequence.request_id] = sequence

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0]))
    def step(self, seconds: float) -> None:
        self.now += seconds
        running = {s for s in self.alive.values() if s.state is SequenceState.RUNNING}
        batch = self.scheduler.schedule(self.now)
        assert running == {*batch.decodes, *batch.preempted, *batch.expired} & running
        self._check_budget(batch)
        for sequence in batch.expired:
            del self.alive[sequence.request_id]
            if sequence.block_table:
                self.held.append(sequence)
        for produced in self.scheduler.commit(batch, [5] * len(batch.sampled), self.now):
            if produced.finish:
                del self.alive[produced.sequence.request_id]

    @rule(data=st.data())
    @precondition(lambda self: self.alive)
    def deliver_or_abort(self, data: st.DataObject) -> None:
        sequence = self.alive[data.draw(st.sampled_from(sorted(self.alive)))]
        if sequence.state is SequenceState.RECEIVING and data.draw(st.booleans()):
            if self.scheduler.arrived(sequence, 5, self.now).finish:
                del self.alive[sequence.request_id]
            return
        held = sequence.state is SequenceState.RECEIVING
        self.scheduler.finish(sequence, release=not held)
        del self.alive[sequence.request_id]
        if held:
            self.held.append(sequence)

    @rule(data=st.data())
    @precondition(lambda self: self.alive)
    def source_begins(self, data: st.DataObject) -> None:
        self.alive[data.draw(st.sampled_from(sorted(self.alive)))].source_has_begun = True

    @rule()
    @precondition(lambda self: self.held)
    def unfence(self) -> None:
        self.scheduler.release_blocks(self.held.pop())

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        blocks = self.scheduler.blocks
        blocks.check()
        assert set(self.scheduler.sequences) == set(self.alive.values())
        tables = [s.block_table for s in (*self.alive.values(), *self.held)]
        assert blocks.num_pinned == len({block for table in tables for block in table})
        shared = [b for s in self.alive.values() for b in s.block_table[s.num_published :]]
        assert len(shared) == len(set(shared)), "a block that is not complete has two owners"
        for sequence in self.alive.values():
            assert sequence.num_computed <= len(sequence.block_table) * BLOCK

    def teardown(self) -> None:
        """Whatever happened before, everything that still lives comes to its end."""
        while self.held:
            self.scheduler.release_blocks(self.held.pop())
        for _ in range(2000):
            if not self.alive:
                break
            for sequence in list(self.alive.values()):
                sequence.source_has_begun = True
                if sequence.state is SequenceState.RECEIVING and (
                    self.scheduler.arrived(sequence, 5, self.now).finish
                ):
                    del self.alive[sequence.request_id]
            self.step(0.01)
            while self.held:
                self.scheduler.release_blocks(self.held.pop())
        assert not self.alive, "starved"
        assert self.scheduler.blocks.num_pinned == 0

    def _check_budget(self, batch: Batch) -> None:
        config = self.scheduler.config
        total = sum(chunk.num_tokens for chunk in batch.chunks)
        assert total <= config.chunk_max_tokens
        for chunk in batch.chunks:
            assert chunk.completes or (chunk.start + chunk.num_tokens) % BLOCK == 0
        if batch.decodes and total > config.chunk_min_tokens:
            slack = min(s.last_token_at for s in batch.decodes) + config.itl_target_s - self.now
            assert self.scheduler.model.predict(batch.cost) <= slack + 1e-9


SchedulerHistory.TestCase.settings = settings(
    max_examples=times(30, 300),
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerHistory = SchedulerHistory.TestCase


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


# -- memory that waits for another worker -------------------------------------------------------


def test_a_remote_prompt_that_its_source_has_not_begun_holds_nothing_and_holds_up_nobody() -> None:
    scheduler = make_scheduler(num_blocks=4)
    waits = make_sequence("waits", list(range(12)), remote=True, priority=9)
    scheduler.add(waits)
    scheduler.add(make_sequence("local", list(range(20, 32))))
    batch = scheduler.schedule(0.0)
    assert [chunk.sequence.request_id for chunk in batch.chunks] == ["local"]
    assert (batch.received, waits.block_table, scheduler.roster.num_held_up) == ([], [], 0)
    waits.source_has_begun = True
    assert scheduler.roster.num_held_up == 1
    assert scheduler.roster.blocks_waiting == 3


def make_prompt(name: str, num_blocks: int, target: str) -> Sequence:
    start = 1000 * len(name) + ord(name[0])
    prompt = list(range(start, start + num_blocks * BLOCK))
    return make_sequence(name, prompt, prefill_only=True, target=target)


def admitted(batch: Batch) -> list[str]:
    return [chunk.sequence.request_id for chunk in batch.chunks]


def test_prompts_that_wait_for_one_target_leave_room_for_those_of_others() -> None:
    scheduler = make_scheduler(num_blocks=8, chunk_max_tokens=64)
    scheduler.shares.num_targets = 2
    for prompt in (
        make_prompt("a", 3, "full"),
        make_prompt("b", 3, "full"),
        make_prompt("c", 1, "full"),  # would fit, but "b" is older
        make_prompt("d", 4, "idle"),
    ):
        scheduler.add(prompt)
    assert admitted(run_step(scheduler)) == ["a", "d"]
    assert admitted(run_step(scheduler)) == []
    (a,) = (each for each in scheduler.shares._waiting.values() if each.request_id == "a")
    scheduler.shares.release(a)
    assert admitted(run_step(scheduler)) == ["c"], "it is granted, and not gone yet: no room for b"
    scheduler.release_blocks(a)
    assert admitted(run_step(scheduler)) == ["b"]


def test_a_target_may_always_have_one_prompt_and_a_single_target_the_whole_pool() -> None:
    scheduler = make_scheduler(num_blocks=8, chunk_max_tokens=64)
    scheduler.shares.num_targets = 2
    scheduler.add(make_prompt("a", 7, "full"))
    assert admitted(run_step(scheduler)) == ["a"]
    alone = make_scheduler(num_blocks=8, chunk_max_tokens=64)
    alone.add(make_prompt("a", 4, "full"))
    alone.add(make_prompt("b", 4, "full"))
    assert admitted(run_step(alone)) == ["a", "b"]


def test_what_fits_beside_stuck_blocks() -> None:
    scheduler = make_scheduler(num_blocks=6)
    prompt = list(range(16))
    scheduler.add(first := make_sequence("first", prompt, remote=True, source_has_begun=True))
    scheduler.schedule(0.0)
    stuck = set(first.block_table)
    scheduler.add(again := make_sequence("again", prompt))
    assert not scheduler.fits_beside(again, stuck), "four blocks beside four of six"
    scheduler.publish_arrived(first, [0, 1])
    assert scheduler.fits_beside(again, stuck), "two of the stuck ones hold its prefix"
    assert scheduler.fits_beside(make_sequence("small", [1] * 8), stuck)
    assert not scheduler.fits_beside(make_sequence("other", [1] * 12), stuck)


def test_prompts_with_a_common_prefix_hold_it_once() -> None:
    scheduler = make_scheduler(num_blocks=12, chunk_max_tokens=64)
    scheduler.shares.num_targets = 2
    prefix = list(range(4 * BLOCK))
    prompts = [
        make_sequence(name, [*prefix, *[ord(name)] * BLOCK], prefill_only=True, target="full")
        for name in "abc"
    ]
    for prompt in prompts:
        scheduler.add(prompt)
        run_step(scheduler)
    assert [bool(prompt.block_table) for prompt in prompts] == [True, True, False]
    assert scheduler.blocks.num_pinned == 6, "half of the pool: the prefix and two blocks"


def test_a_prompt_that_ends_without_a_grant_leaves_its_share() -> None:
    scheduler = make_scheduler(num_blocks=8, chunk_max_tokens=64)
    scheduler.shares.num_targets = 2
    gone = make_prompt("a", 4, "full")
    scheduler.add(gone)
    run_step(scheduler)
    scheduler.release_blocks(gone)
    scheduler.add(make_prompt("b", 4, "full"))
    assert admitted(run_step(scheduler)) == ["b"]
    assert list(scheduler.shares._waiting) == [("b", 0)]


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
    scheduler = make_scheduler(chunk_max_tokens=8)
    sequence = make_sequence("long", list(range(30)))
    scheduler.add(sequence)
    steps = []
    for _ in range(2):
        steps.append(scheduler.schedule(0.0))
        scheduler.launched(steps[-1])
    scheduler.landed(steps[0])
    scheduler.commit(steps[0], [], 0.0)
    assert sequence.num_computed == 16


def test_blocks_are_released_when_the_last_step_that_uses_them_has_landed() -> None:
    scheduler = make_scheduler(chunk_max_tokens=8)
    sequence = make_sequence("long", list(range(30)))
    scheduler.add(sequence)
    steps = []
    for _ in range(2):
        steps.append(scheduler.schedule(0.0))
        scheduler.launched(steps[-1])
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
