"""Steps ahead: launches a step before the tokens of the previous ones are known.

While a card computes step n+1, its host reads and delivers the tokens of step n, accepts new
requests, and plans step n+2. Tokens that the host does not know yet stay on the card, where the
next step reads them. A pipeline computes one step in each stage. Sequences are updated when a step
ends; a sequence that finishes meanwhile, for any reason, is left out when the steps under way are
read. Only chunks that give no token are committed at their launch (see `Scheduler.launched`).

Invariants: steps end in launch order; blocks that a step under way uses are not free (see
`Scheduler.landed`); before a step's fence is passed, only later steps may read its results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from engine.fences import PASSED, Fence
from engine.runner import AnyRunner, StepAhead
from engine.step_result import StepResult, Stored, commit
from scheduling.batch import Batch
from scheduling.scheduler import Scheduler
from scheduling.sequence import SequenceState
from scheduling.step_model import StepCost


@dataclass(frozen=True)
class _Step:
    batch: Batch
    cost: StepCost
    launched: float
    chosen: StepAhead


class StepsAhead:
    """The steps under way of one engine; used by its thread."""

    def __init__(self, scheduler: Scheduler, runner: AnyRunner, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._steps: deque[_Step] = deque()
        self._ended = 0.0  # when the last step ended
        self.num_stages = 1  # stages of a pipeline, each of which may compute a step
        self.under_way_s = 0.0

    @property
    def is_under_way(self) -> bool:
        """Whether a step is launched and not yet read."""
        return bool(self._steps)

    @property
    def fence(self) -> Fence:
        """The fence behind all that launched steps write to the pool."""
        return self._steps[-1].chosen.stored if self._steps else PASSED

    def launch(self, batch: Batch, num_ahead: int) -> StepResult:
        """Launch a batch. If more than `num_ahead` steps are under way then, end the oldest and
        return its result; else the result is empty. It also names the batch's chunks that give no
        token, as `stored`.

        After an error, all steps are left to `try_withdraw`.
        """
        before = self._steps[-1].chosen if self._steps else None
        cost, now = batch.cost, self._clock()
        chosen = self._runner.launch_ahead(batch, before)
        self._scheduler.launched(batch)
        self._steps.append(_Step(batch, cost, now, chosen))
        is_full = len(self._steps) > num_ahead
        result = self.end() if is_full else StepResult(Batch(), [], [], now, now)
        fresh = [Stored(chunk, chosen.stored) for chunk in batch.incomplete]
        return replace(result, stored=result.stored + fresh)

    def end(self) -> StepResult:
        """Wait for the oldest step under way and commit it, without the sequences that have
        finished since its launch: by a final token, by their owner, or by a failed row."""
        step = self._steps[0]
        rows = step.chosen.read()
        self._steps.popleft()
        is_alone = step.launched >= self._ended
        started, self._ended = max(step.launched, self._ended), self._clock()
        self._observe(step.cost, self._ended - started, is_alone)
        self._scheduler.landed(step.batch)
        finished = {s for s in step.batch.sequences if s.state is SequenceState.FINISHED}
        kept = [row for s, row in zip(step.batch.sampled, rows, strict=True) if s not in finished]
        result = commit(self._scheduler, step.batch.without(finished), kept, started, self._ended)
        stored = [each for each in result.stored if each.chunk.completes]
        return replace(result, stored=stored)

    def observe_alone(self, cost: StepCost, seconds: float) -> None:
        """Teach the step model by a step that ran alone."""
        self._observe(cost, seconds, is_alone=True)

    def _observe(self, cost: StepCost, seconds: float, is_alone: bool) -> None:
        """Teach the step model how long a step keeps others from starting. In a pipeline that is
        the time between the ends of two steps; a step alone passes all stages in turn."""
        self.under_way_s += seconds
        self._scheduler.model.observe(cost, seconds / self.num_stages if is_alone else seconds)

    def try_withdraw(self) -> bool:
        """Drop the steps under way, if there are any. Their tokens are planned again, but not the
        chunks that were committed at their launch. Returns whether there were any. No work is
        left on the device, not even of a step that could not be launched."""
        with suppress(RuntimeError):  # a card that has failed computes nothing more
            self._runner.wait()
        num_steps = len(self._steps)
        while self._steps:
            self._scheduler.landed(self._steps.popleft().batch)
        return num_steps > 0


def can_run_ahead(batch: Batch) -> bool:
    """Whether the next batch can be launched before the host knows the result of this one."""
    return (
        not batch.is_empty
        and not any(chunk.sequence.needs_prompt_logits for chunk in batch.chunks)
        and not any(chunk.sequence.grammar is not None for chunk in batch.chunks if chunk.completes)
        and not any(sequence.follows_tokens for sequence in batch.decodes)
    )
