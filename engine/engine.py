"""One model on one device, a step at a time: schedule, run, commit.

Owns the scheduler and the runner, measures every step and teaches the step model. Knows neither
roles nor networks; its owner adds sequences and carries results away. A step that gives a token
ends with it. One that only fills the KV pool may still be under way on a card when the next is
planned, and at most one is: the card takes steps in order, so whoever reads the pool by a later
step reads what this one wrote, and anybody else waits for `computed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.device import PASSED, Fence
from engine.runner import NOT_FINITE, ModelRunner, RowFailure
from engine.sampler import SampledToken
from engine.scheduler import Batch, Produced, Scheduler
from engine.sequence import Sequence
from engine.step_model import StepCost
from protocol.errors import GenerationFailed
from protocol.layout import KvLayout
from protocol.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class StepResult:
    """A step that ran: its batch, the tokens it produced, and its two clock readings (s); `ended`
    is when it was launched if a card may still compute it.

    `failed` are sequences from whose logits nothing could be chosen, and why. They are not part of
    `batch`, nothing of theirs was committed, and their owner has to end them. Blocks of those whose
    logits were not finite are offered to nobody.
    """

    batch: Batch
    produced: list[Produced]
    logprobs: list[TokenLogprobs | None]
    started: float
    ended: float
    failed: list[tuple[Sequence, RowFailure]] = field(default_factory=list)


@dataclass(frozen=True)
class _UnderWay:
    """A step that a card has not finished, as far as is known; `cost` None if its time teaches
    nothing."""

    cost: StepCost | None
    started: float
    fence: Fence


class Engine:
    """Scheduler and runner of one worker; used by one thread.

    `runs_ahead` lets a step that gives no token go on while the next is prepared. Only for pools
    that no peer writes to: a freed block may still be written by the step under way.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        layout: KvLayout,
        limits: EngineLimits,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler
        self.layout = layout
        self.limits = limits
        self._runner = runner
        self._clock = clock
        self.runs_ahead = False
        self._under_way: _UnderWay | None = None

    @property
    def computed(self) -> Fence:
        """Passed once the pool holds all that was committed so far."""
        return PASSED if self._under_way is None else self._under_way.fence

    def plan(self) -> Batch:
        """What the next step would do; sequences may have been admitted, preempted, expired."""
        return self.scheduler.schedule(self._clock())

    def run(self, batch: Batch) -> StepResult:
        """Compute a planned batch and commit it. An empty one costs nothing."""
        started = self._clock()
        if batch.is_empty:
            self._end_step()
            return StepResult(batch, [], [], started, started)
        tells_of_prompts = any(chunk.sequence.needs_prompt_logits for chunk in batch.chunks)
        if tells_of_prompts:
            started = self._end_step()  # what is told is waited for at the launch
        logits, fence = self._runner.launch(batch)
        if self._under_way is not None:
            started = self._end_step()  # not before has the card begun with this one
        rows = self._runner.sample(batch, logits)
        self._under_way = _UnderWay(None if tells_of_prompts else batch.cost, started, fence)
        may_go_on = self.runs_ahead and not rows and not fence.is_done()
        ended = self._clock() if may_go_on else self._end_step()
        outcomes = zip(batch.sampled, rows, strict=True)
        failed = [(s, row) for s, row in outcomes if isinstance(row, RowFailure)]
        for sequence, failure in failed:
            if failure == NOT_FINITE:  # what made it so may lie in its blocks
                self.scheduler.blocks.withdraw(sequence.block_table)
        batch = _without(batch, [sequence for sequence, _ in failed]) if failed else batch
        sampled = [row for row in rows if isinstance(row, SampledToken)]
        produced = self.scheduler.commit(batch, [s.token_id for s in sampled], ended)
        logprobs = [_wire_logprobs(s) for s in sampled]
        return StepResult(batch, produced, logprobs, started, ended, failed)

    def _end_step(self) -> float:
        """Wait for the step under way, if any, and learn from its time; the clock then."""
        step, self._under_way = self._under_way, None
        if step is not None:
            step.fence.wait()
        now = self._clock()
        if step is not None and step.cost is not None:
            self.scheduler.model.observe(step.cost, now - step.started)
        return now

    def warm_up(self) -> None:
        """Run a prompt and a few decodes, so that the first request meets a warm engine.

        Raises GenerationFailed if the model's logits are not finite.
        """
        blocks = self.scheduler.blocks
        size = self.layout.block_size
        room = min(blocks.num_blocks * size, self.limits.max_context)
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
            if self.run(self.plan()).failed:
                raise GenerationFailed("the model's logits are not finite: check its weights")
        blocks.clear_cache()
        blocks.drain_events()


@dataclass(frozen=True)
class EngineLimits:
    """What a request may ask of this engine."""

    vocab_size: int
    max_context: int


def _without(batch: Batch, sequences: list[Sequence]) -> Batch:
    """The step as if these had not been part of it."""
    left_out = {sequence.key for sequence in sequences}
    return replace(
        batch,
        decodes=[sequence for sequence in batch.decodes if sequence.key not in left_out],
        chunks=[chunk for chunk in batch.chunks if chunk.sequence.key not in left_out],
    )


def _wire_logprobs(sampled: SampledToken) -> TokenLogprobs | None:
    if sampled.logprob is None:
        return None
    return TokenLogprobs(sampled.logprob, tuple(sampled.top))
