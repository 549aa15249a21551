"""What a scheduler promises whatever happens to its sequences."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduling.batch import Batch
from scheduling.sequence import Sequence, SequenceState
from tests.effort import times
from tests.unit.scheduling.scheduler_harness import BLOCK, make_scheduler, make_sequence


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
