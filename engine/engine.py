"""One model on one device, a step at a time: schedule, run, commit.

Owns the scheduler and the runner, measures every step and teaches the step model. Knows neither
roles nor networks; its owner adds sequences and carries results away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.runner import ModelRunner
from engine.sampler import SampledToken
from engine.scheduler import Batch, Produced, Scheduler
from engine.sequence import Sequence
from protocol.layout import KvLayout
from protocol.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class StepResult:
    """A step that ran: its batch, the tokens it produced, and its two clock readings (s)."""

    batch: Batch
    produced: list[Produced]
    logprobs: list[TokenLogprobs | None]
    started: float
    ended: float


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
        sampled = self._runner.run(batch)
        ended = self._clock()
        self.scheduler.model.observe(cost, ended - started)
        produced = self.scheduler.commit(batch, [s.token_id for s in sampled], ended)
        return StepResult(batch, produced, [_wire_logprobs(s) for s in sampled], started, ended)

    def warm_up(self) -> None:
        """Run a prompt and a few decodes, so that the first request meets a warm engine."""
        blocks = self.scheduler.blocks
        size = self.layout.block_size
        room = min(blocks.num_blocks * size, self.limits.max_context)
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
            self.run(self.plan())
        blocks.clear_cache()
        blocks.drain_events()


@dataclass(frozen=True)
class EngineLimits:
    """What a request may ask of this engine."""

    vocab_size: int
    max_context: int


def _wire_logprobs(sampled: SampledToken) -> TokenLogprobs | None:
    if sampled.logprob is None:
        return None
    return TokenLogprobs(sampled.logprob, tuple(sampled.top))
