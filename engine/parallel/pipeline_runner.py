"""The runner of a pipeline: the stages before the head's compute steps ahead of it.

A step that is launched ahead is announced at once, so that the first stage begins with it while
later stages have earlier steps. The head itself, the last stage, computes a step when its result is
read, or when somebody waits for it. Passes run in the order of their announcements on every rank.
"""

from __future__ import annotations

from collections import deque

from engine.fences import Fence
from engine.model_runner import Chosen, Launched, ModelRunner, PlannedStep
from engine.parallel.leader import LeadingModel
from engine.runner import Row
from scheduling.batch import Batch


class PipelineRunner:
    """The `Runner` of a model in several stages; `own` runs the last one."""

    def __init__(self, own: ModelRunner, model: LeadingModel) -> None:
        self._own = own
        self._model = model
        self._announced: deque[PipelineStep] = deque()

    def launch(self, batch: Batch) -> tuple[Launched, Fence]:
        """See Runner; no step may be under way."""
        assert not self._announced
        return self._own.launch(batch)

    def sample(self, batch: Batch, launched: Launched) -> list[Row]:
        """See Runner."""
        return self._own.sample(batch, launched)

    def launch_ahead(self, batch: Batch, before: PipelineStep | None) -> PipelineStep:
        """See Runner. No token of the batch may be unknown."""
        planned = self._own.plan_ahead(batch, None)
        self._model.announce_ahead(planned.inputs.segments, planned.inputs.tokens)
        step = PipelineStep(planned, self)
        self._announced.append(step)
        return step

    def wait(self) -> None:
        """See Runner: runs what is announced, so that all ranks have done the same."""
        while self._announced:
            self.run_next()

    def run_next(self) -> None:
        """Run the oldest announced step."""
        step = self._announced.popleft()
        step.chosen = self._own.run_planned(step.planned)


class PipelineStep:
    """A `StepAhead` that is announced; also the fence behind what it writes to the pool."""

    def __init__(self, planned: PlannedStep, runner: PipelineRunner) -> None:
        self.planned = planned
        self.chosen: Chosen | None = None
        self._runner = runner

    @property
    def stored(self) -> Fence:
        """See StepAhead."""
        return self

    def read(self) -> list[Row]:
        """See StepAhead."""
        self.wait()
        assert self.chosen is not None
        return self.chosen.read()

    def is_done(self) -> bool:
        """See Fence. All stages have landed once the last one has."""
        return self.chosen is not None and self.chosen.stored.is_done()

    def wait(self) -> None:
        """See Fence; only for the thread that runs the steps."""
        while self.chosen is None:
            self._runner.run_next()
        self.chosen.stored.wait()
