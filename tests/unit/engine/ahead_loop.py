"""An engine that runs one step ahead or does not, and its owner, turn by turn.

A real runner and sampler over a model that reads its context from the pool's memory, so that a
block with wrong contents gives wrong tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.attention.base import Segment
from engine.engine import Engine, EngineLimits
from engine.model_runner import Chosen, ModelRunner
from engine.runner import RowFailure, SampledToken
from engine.sampling.grammar import Grammars
from engine.sampling.sampler import Sampler
from engine.step_result import StepResult
from protocol.sampling import SamplingParams
from scheduling.batch import Batch
from scheduling.block_manager import BlockManager
from scheduling.scheduler import Scheduler, SchedulerConfig
from scheduling.sequence import Sequence, SequenceState
from scheduling.step_model import StepModel
from tests.layouts import bare_layout
from tests.sequences import sequence_of

BLOCK, VOCAB = 4, 24
SICK_EVERY = 211  # contexts of which one has no finite logits
LAYOUT = bare_layout(BLOCK)


class PoolAttention:
    """Where the planned tokens and their contexts are in memory [num_blocks * BLOCK]."""

    def __init__(self, num_blocks: int) -> None:
        self.memory = np.full(num_blocks * BLOCK, -1)
        self.segments: list[tuple[int, np.ndarray]] = []

    def plan(self, segments: Seq[Segment]) -> None:
        self.segments = [(s.query_len, _slots(s)) for s in segments]


def _slots(segment: Segment) -> np.ndarray:
    """The slots of all tokens of a context."""
    positions = np.arange(segment.context_len)
    return np.array(segment.block_table)[positions // BLOCK] * BLOCK + positions % BLOCK


class PoolModel:
    """Stores tokens in the pool; what it makes of one is a digest of its context there. Logits are
    pseudo-random in that; none is finite for some of them."""

    device = torch.device("cpu")
    config = SimpleNamespace(vocab_size=VOCAB)

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: PoolAttention,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        digests: list[int] = []
        left = tokens.tolist()
        for size, slots in attention.segments:
            now, left = left[:size], left[size:]
            attention.memory[slots[-size:]] = now
            context = attention.memory[slots]
            ends = range(len(slots) - size + 1, len(slots) + 1)
            digests += [zlib.crc32(context[:end].tobytes()) for end in ends]
        made = torch.tensor(digests)
        return made if rows is None else made[rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = [_logits(digest) for digest in hidden.tolist()]
        return torch.stack(rows) if rows else torch.empty((0, VOCAB))


def _logits(digest: int) -> torch.Tensor:
    if digest % SICK_EVERY == 0:
        return torch.full((VOCAB,), torch.nan)
    generator = torch.Generator().manual_seed(digest)
    return torch.randn(VOCAB, generator=generator) * 2


class CountingRunner(ModelRunner):
    """Notes which steps were launched and read, and how many tokens nobody knew at a launch."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.log: list[str] = []
        self.num_promised = 0
        self.raises_at: int | None = None  # the launch that raises, counted from now

    def launch_ahead(self, batch: Batch, before: Chosen | None) -> Chosen:
        self._count_down()
        self.num_promised += sum(s.num_ahead > 0 for s in batch.decodes)
        chosen = super().launch_ahead(batch, before)
        self.log.append("launch")
        return _Noted(**vars(chosen), log=self.log)

    def launch(self, batch: Batch) -> Any:
        self._count_down()
        self.log.append("alone")
        return super().launch(batch)

    def _count_down(self) -> None:
        if self.raises_at is not None:
            self.raises_at -= 1
            if self.raises_at < 0:
                self.raises_at = None
                raise RuntimeError("the device is on fire")


@dataclass(frozen=True)
class _Noted(Chosen):
    log: list[str] = field(default_factory=list)

    def read(self) -> list[SampledToken | RowFailure]:
        self.log.append("read")
        return super().read()


@dataclass(frozen=True)
class Asked:
    """A request, and what becomes of it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    turn: int = 0
    is_remote: bool = False
    priority: int = 0
    aborted_at: int | None = None
    deadline: float = 1e9


@dataclass
class Told:
    """What a request's owner heard."""

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    end: str = ""


class Loop:
    """An engine and its owner, who adds, aborts and delivers as turns go by."""

    def __init__(self, one_step_ahead: bool, num_blocks: int = 64, max_batch_size: int = 6) -> None:
        self.attention = PoolAttention(num_blocks)
        self.runner = CountingRunner(
            PoolModel(), self.attention, Sampler(VOCAB), Grammars(Path("none"), VOCAB, ())
        )
        config = SchedulerConfig(
            BLOCK, max_batch_size, chunk_min_tokens=BLOCK, chunk_max_tokens=2 * BLOCK
        )
        self.scheduler = Scheduler(config, BlockManager(num_blocks), StepModel())
        self.turn = 0
        limits = EngineLimits(VOCAB, num_blocks * BLOCK)
        self.engine = Engine(self.scheduler, self.runner, LAYOUT, limits, lambda: 0.01 * self.turn)
        self.engine.run_ahead(int(one_step_ahead))
        self.told: dict[str, Told] = {}
        self.arriving: list[tuple[int, Sequence]] = []

    def serve(self, workload: Seq[Asked]) -> dict[str, Told]:
        """Serve the workload until all requests have ended. Asserts that nothing of them is
        left."""
        for self.turn in range(3000):
            for number, asked in enumerate(workload):
                if asked.turn == self.turn:
                    self.add(f"r{number}", asked)
                if asked.aborted_at == self.turn:
                    self.end(f"r{number}", "aborted")
            self.receive()
            self.step()
            if len(self.told) == len(workload) and all(t.end for t in self.told.values()):
                break
        self.step()
        assert not self.engine.is_ahead
        assert self.scheduler.blocks.num_pinned == 0
        assert self.scheduler.sequences == []
        return self.told

    def add(self, name: str, asked: Asked) -> Sequence:
        sequence = sequence_of(
            asked.prompt,
            asked.params,
            BLOCK,
            request_id=name,
            arrival=0.01 * self.turn,
            deadline=asked.deadline,
            priority=asked.priority,
            remote=asked.is_remote,
            source_has_begun=asked.is_remote,
        )
        self.scheduler.add(sequence)
        self.told[name] = Told(sequence)
        return sequence

    def end(self, name: str, how: str) -> None:
        told = self.told.get(name)
        if told is None or told.end:
            return
        told.end = how
        if told.sequence.state is not SequenceState.FINISHED:
            self.scheduler.finish(told.sequence)
        else:
            self.scheduler.release_blocks(told.sequence)

    def receive(self) -> None:
        """Let blocks of a peer arrive two turns after they were granted. The peer wrote them at
        once."""
        for due, sequence in list(self.arriving):
            if due <= self.turn:
                self.arriving.remove((due, sequence))
                if sequence.state is SequenceState.RECEIVING:
                    self.note(self.scheduler.arrived(sequence, 1, 0.01 * self.turn), None)

    def step(self) -> None:
        batch = self.engine.plan()
        self.scheduler.blocks.check()
        for sequence in batch.expired:
            self.end(sequence.request_id, "expired")
        for sequence in batch.received:
            context = Segment(sequence.num_tokens, sequence.num_tokens, sequence.block_table)
            self.attention.memory[_slots(context)] = sequence.tokens
            self.arriving.append((self.turn + 2, sequence))
        try:
            result = self.engine.run(batch)
        except RuntimeError:
            if not self.engine.try_withdraw():
                self.deliver(self.engine.run_alone(batch))
            return
        self.deliver(result)

    def deliver(self, result: StepResult) -> None:
        for produced, logprobs in zip(result.produced, result.logprobs, strict=True):
            self.note(produced, logprobs)
        for sequence, failure in result.failed:
            self.end(sequence.request_id, failure.reason)

    def note(self, produced: Any, logprobs: Any) -> None:
        told = self.told[produced.sequence.request_id]
        assert not told.end
        assert produced.index == len(told.tokens)
        told.tokens.append(produced.token_id)
        told.logprobs.append(logprobs)
        told.end = produced.finish or ""
