"""One model on one device, a step at a time: schedule, run, commit.

Owns the scheduler and the runner, measures every step and updates the step model. Any `Runner` will
do, so this file imports no torch. Knows neither roles nor networks; its owner adds sequences and
takes the results. The engine waits for each step, unless it runs steps ahead
(`engine.steps_ahead`). The device runs steps in order, so a later step can read the pool at once;
every other reader waits for a fence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from engine.expert_loads import ExpertLoads
from engine.fences import Fence
from engine.rank_times import RankTime
from engine.runner import AnyRunner
from engine.step_result import StepResult, commit
from engine.steps_ahead import StepsAhead, can_run_ahead
from protocol.errors import GenerationFailed
from protocol.layout import KvLayout
from protocol.sampling import SamplingParams
from scheduling.batch import Batch
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence

log = logging.getLogger(__name__)


class Engine:
    """Scheduler and runner of one worker; used by one thread.

    `expert_loads` returns the loads of the model's mixtures so far, None if there are none.
    `rank_times` returns the times of the model's ranks, empty for a single rank.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: AnyRunner,
        layout: KvLayout,
        limits: EngineLimits,
        clock: Callable[[], float],
        expert_loads: Callable[[], ExpertLoads | None] = lambda: None,
    ) -> None:
        self.scheduler = scheduler
        self.layout = layout
        self.limits = limits
        self.expert_loads = expert_loads
        self.rank_times: Callable[[], list[RankTime]] = list
        self._runner = runner
        self._clock = clock
        self._num_ahead = 0
        self._ahead = StepsAhead(scheduler, runner, clock)
        self._is_cautious = False  # a step failed: the next one runs by itself

    def run_ahead(self, num_steps: int, num_stages: int = 1) -> None:
        """Let `run` launch up to `num_steps` steps before it reads the result of an earlier one. A
        pipeline of `num_stages` stages computes that many steps at a time. Where layers keep
        states, this has no effect: a step reads the states that the step before it has written."""
        if num_steps and self.layout.has_states:
            log.warning("no step runs ahead of the one before: layers of this model keep states")
            return
        self._num_ahead = num_steps
        self._ahead.num_stages = num_stages

    @property
    def under_way_s(self) -> float:
        """For how long steps were under way so far."""
        return self._ahead.under_way_s

    @property
    def computed(self) -> Fence:
        """A fence, passed once the pool holds all committed tokens and no step launched so far
        writes to it."""
        return self._ahead.fence

    @property
    def is_ahead(self) -> bool:
        """Whether steps are under way whose results `run` has not returned yet."""
        return self._ahead.is_under_way

    def plan(self) -> Batch:
        """Plan the next step; this may admit, preempt and expire sequences."""
        return self.scheduler.schedule(self._clock())

    def run(self, batch: Batch) -> StepResult:
        """Compute a planned batch and commit it. An empty batch costs nothing.

        With `run_ahead`, launches the batch. If as many steps as may be are under way already,
        commits the oldest of them and returns its result. If the batch cannot run ahead of the
        steps under way, `run` only ends the oldest; the batch has to be planned again. After `run`
        has raised, call `try_withdraw`.
        """
        if self._num_ahead and not self._is_cautious and can_run_ahead(batch):
            return self._ahead.launch(batch, self._num_ahead)
        if self._ahead.is_under_way:
            return self._ahead.end()
        self._is_cautious = False
        return self.run_alone(batch)

    def try_withdraw(self) -> bool:
        """After a step has raised, drop the steps under way; returns whether there were any. Then
        their tokens have to be planned again, and the next step runs alone."""
        self._is_cautious = self._ahead.try_withdraw()
        return self._is_cautious

    def run_alone(self, batch: Batch) -> StepResult:
        """Like `run`, but never ahead; no step may be under way."""
        started = self._clock()
        if batch.is_empty:
            return StepResult(batch, [], [], started, started)
        logits, fence = self._runner.launch(batch)
        rows = self._runner.sample(batch, logits)
        fence.wait()
        ended = self._clock()
        if not any(chunk.sequence.needs_prompt_logits for chunk in batch.chunks):
            self._ahead.observe_alone(batch.cost, ended - started)
        return commit(self.scheduler, batch, rows, started, ended)

    def warm_up(self) -> None:
        """Run a prompt and a few decodes, so that the engine is warm for the first request.

        Raises GenerationFailed if the model's logits are not finite.
        """
        size = self.layout.block_size
        room = min(self.scheduler.most_tokens, self.limits.max_context)
        if room < 2:
            return
        prompt = min(self.scheduler.config.chunk_max_tokens, room - 1)
        num_decodes = min(4, room - prompt)
        sequence = Sequence(
            request_id="warm-up",
            attempt=0,
            tokens=[i % self.limits.vocab_size for i in range(prompt)],
            num_prompt=prompt,
            sampling=SamplingParams(max_tokens=num_decodes, seed=0, temperature=0.0),
            root_hash=b"warm-up",
            block_size=size,
            arrival=self._clock(),
            deadline=float("inf"),
        )
        self.scheduler.add(sequence)
        while self.scheduler.has_work:
            if self.run_alone(self.plan()).failed:
                raise GenerationFailed("the model's logits are not finite: check its weights")
        self.scheduler.pools.clear_cache()


@dataclass(frozen=True)
class EngineLimits:
    """Limits on the requests that this engine accepts."""

    vocab_size: int
    max_context: int
