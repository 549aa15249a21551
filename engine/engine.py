"""One model on one device, a step at a time: schedule, run, commit.

Owns the scheduler and the runner, measures every step and teaches the step model. Knows neither
roles nor networks; its owner adds sequences and carries results away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.runner import ModelRunner, RowFailure
from engine.sampler import SampledToken
from engine.scheduler import Batch, Produced, Scheduler
from engine.sequence import Sequence
from protocol.errors import GenerationFailed
from protocol.layout import KvLayout
from protocol.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class StepResult:
    """A step that ran: its batch, the tokens it produced, and its two clock readings (s).

    `failed` are sequences from whose logits nothing could be chosen, and why. They are not part of
    `batch`, nothing of theirs was committed, their blocks are offered to nobody, and their owner
    has to end them.
    """

    batch: Batch
    produced: list[Produced]
    logprobs: list[TokenLogprobs | None]
    started: float
    ended: float
    failed: list[tuple[Sequence, RowFailure]] = field(default_factory=list)


class Engine:
    """Scheduler and runner of one worker; used by one thread."""

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

    def plan(self) -> Batch:
        """What the next step would do; sequences may have been admitted, preempted, expired."""
        return self.scheduler.schedule(self._clock())

    def run(self, batch: Batch) -> StepResult:
        """Compute a planned batch and commit it. An empty one costs nothing."""
        started = self._clock()
        if batch.is_empty:
            return StepResult(batch, [], [], started, started)
        cost = batch.cost
        rows = self._runner.run(batch)
        ended = self._clock()
        self.scheduler.model.observe(cost, ended - started)
        outcomes = zip(batch.sampled, rows, strict=True)
        failed = [(s, row) for s, row in outcomes if isinstance(row, RowFailure)]
        for sequence, _ in failed:
            self.scheduler.blocks.withdraw(sequence.block_table)
        batch = _without(batch, [sequence for sequence, _ in failed]) if failed else batch
        sampled = [row for row in rows if isinstance(row, SampledToken)]
        produced = self.scheduler.commit(batch, [s.token_id for s in sampled], ended)
        logprobs = [_wire_logprobs(s) for s in sampled]
        return StepResult(batch, produced, logprobs, started, ended, failed)

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
