"""A model for workers without one: it writes what it computes into the pool's memory and chooses
tokens by what it reads there, so that a block with wrong contents gives wrong tokens."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from engine.fences import PASSED, Fence
from engine.runner import LATE, NOT_FINITE, Row, SampledToken
from protocol.sampling import PromptLogprobs
from scheduling.batch import Batch
from scheduling.prompt_record import PromptRecord, PromptRows
from scheduling.sequence import Sequence

BLOCK = 4
VOCAB = 50


Tables = list[tuple[list[int], int]]
"""By group, the blocks of a sequence and the index of the first one."""


def _tables(sequence: Sequence) -> Tables:
    return [(list(table.blocks), table.first) for table in sequence.tables]


def next_token(context: Seq[int]) -> int:
    """The token with which the fake model continues a text."""
    return zlib.crc32(repr(list(context)).encode()) % VOCAB


def continuation(prompt: Seq[int], num_tokens: int) -> list[int]:
    """The output that every path must give."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class LateFence:
    """A point in the work that the model has put off: it is passed once somebody has waited for it,
    or for later work."""

    model: FakeModel
    has_passed: bool = False

    def is_done(self) -> bool:
        return self.has_passed

    def wait(self) -> None:
        while not self.has_passed:
            self.model.late.popleft()()


@dataclass(eq=False)
class LateStep:
    """A step that was launched ahead: what it was given, and tokens once it is computed. It first
    fills its blocks, and passes `stored`; then it chooses its tokens, and passes `fence`."""

    model: FakeModel
    number: int
    spans: list[tuple[Sequence, Tables, int, list[int] | LateStep]]  # blocks, start, tokens
    sampled: dict[Sequence, int]  # contexts
    tokens: dict[Sequence, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stored, self.fence = LateFence(self.model), LateFence(self.model)

    def read(self) -> list[Row]:
        self.model.log.append(f"read {self.number}")
        self.model.strike("late")
        self.fence.wait()
        broken = self.model.broken
        return [
            NOT_FINITE if s.request_id in broken else SampledToken(self.tokens[s])
            for s in self.sampled
        ]

    def fill(self) -> None:
        for sequence, tables, start, tokens in self.spans:
            if isinstance(tokens, LateStep):
                tokens = [tokens.tokens[sequence]]
            self.model.write(tables, start, tokens)
        self.stored.has_passed = True

    def choose(self) -> None:
        for sequence, length in self.sampled.items():
            tables = next(tables for s, tables, _, _ in self.spans if s is sequence)
            self.tokens[sequence] = self.model.choose(tables, length)
        self.fence.has_passed = True


class FakeModel:
    """A runner over a pool of token ids: `memory` has that of each group, [blocks, layers * BLOCK],
    where each layer repeats the tokens. A layer with a window reads no others: if one is not there,
    the next token is wrong. So it is if a state, in the groups `states`, is not that of all tokens
    before it.

    `broken` names requests whose logits are not finite, `late_masks` those whose mask is late once.
    `explodes` makes the next step raise, at its launch or when what was launched ahead is read
    ("late"); `fence` stands behind every step. Steps that are launched ahead are computed as late
    as a card could; `strays` are blocks that were written to but not `is_owned`, or while a peer
    `is_reading` them (an error would be taken for the step's own). `log` tells which steps were
    launched ahead and read."""

    def __init__(
        self,
        memory: Seq[torch.Tensor],
        is_owned: Callable[[int, int], bool],
        windows: Seq[int | None] = (None,),
        states: Seq[int] = (),
    ) -> None:
        self._memory = memory
        self._is_owned = is_owned
        self._windows = windows
        self._states = states
        self.is_reading: Callable[[int, int], bool] = lambda group, block: False
        self.broken: set[str] = set()
        self.late_masks: set[str] = set()
        self.explodes: str | None = None
        self.fence: Fence = PASSED
        self.late: deque[Callable[[], None]] = deque()
        self.log: list[str] = []
        self.strays: list[int] = []
        self.num_promised = 0  # tokens that were computed before anybody knew them

    def strike(self, when: str) -> None:
        """Raise, if a test asked for an error at this point."""
        if self.explodes == when:
            self.explodes = None
            raise RuntimeError("the device is on fire")

    def write(self, tables: Tables, start: int, tokens: Seq[int]) -> None:
        """Store tokens at positions from `start` on."""
        for group, (blocks, first) in enumerate(tables):
            if group in self._states:
                continue
            for position, token in enumerate(tokens, start):
                block = blocks[position // BLOCK - first]
                if not self._is_owned(group, block) or self.is_reading(group, block):
                    self.strays.append(block)
                self._memory[group][block, position % BLOCK :: BLOCK] = token

    def write_states(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Store the states behind the tokens of a sequence's staged step."""
        step = sequence.state_step
        for group in self._states:
            assert step is not None
            memory = self._memory[group]
            state = 0 if step.read is None else int(memory[step.read, 0])
            slots = dict(step.writes)
            for count, token in enumerate(tokens, 1):
                state = _next_state(state, token)
                slot = slots.get(count)
                if slot is None:
                    continue
                if not self._is_owned(group, slot) or self.is_reading(group, slot):
                    self.strays.append(slot)
                memory[slot] = state

    def has_states(self, sequence: Sequence) -> bool:
        """Whether the states behind a sequence's staged step are right."""
        state, step = 0, sequence.state_step
        for token in sequence.tokens if self._states else ():
            state = _next_state(state, token)
        return all(
            step is not None and bool((self._memory[group][step.writes[-1][1]] == state).all())
            for group in self._states
        )

    def choose(self, tables: Tables, length: int) -> int:
        """The token that follows `length` stored ones."""
        blocks, _ = tables[0]
        tokens = self._memory[0][list(blocks), :BLOCK].flatten()[:length].tolist()
        for group, window in enumerate(self._windows):
            if group in self._states:
                continue
            blocks, first = tables[group]
            for position in range(max(0, length - window) if window else length, length):
                at = position // BLOCK - first
                read = self._memory[group][blocks[at], position % BLOCK :: BLOCK]
                if at < 0 or not (read == tokens[position]).all():
                    return (next_token(tokens) + 1) % VOCAB
        return next_token(tokens)

    def launch_ahead(self, batch: Batch, before: LateStep | None) -> LateStep:
        self.strike("launch")
        spans: list[tuple[Sequence, Tables, int, list[int] | LateStep]] = []
        ends: dict[Sequence, int] = {}
        starts = [(s, s.num_launched, 1) for s in batch.decodes]
        starts += [(c.sequence, c.start, c.num_tokens) for c in batch.chunks]
        for sequence, start, size in starts:
            tokens: list[int] | LateStep = sequence.tokens[start : start + size]
            if not tokens:
                assert before is not None
                tokens = before
                self.num_promised += 1
            spans.append((sequence, _tables(sequence), start, tokens))
            ends[sequence] = start + size
        number = sum(each.startswith("launch") for each in self.log)
        self.log.append(f"launch {number}")
        step = LateStep(self, number, spans, {s: ends[s] for s in batch.sampled})
        self.late += [step.fill, step.choose]
        return step

    def wait(self) -> None:
        while self.late:
            self.late.popleft()()

    def launch(self, batch: Batch) -> tuple[torch.Tensor, Fence]:
        self.strike("launch")
        self.wait()
        spans = [(s, s.num_computed, 1) for s in batch.decodes]
        spans += [(c.sequence, c.start, c.num_tokens) for c in batch.chunks]
        for sequence, start, size in spans:
            tokens = sequence.tokens[start : start + size]
            self.write(_tables(sequence), start, tokens)
            self.write_states(sequence, tokens)
            if sequence.needs_prompt_logits:
                _record(sequence, start, size)
        return torch.empty(0), self.fence

    def sample(self, batch: Batch, logits: torch.Tensor) -> list[Row]:
        rows: list[Row] = []
        for sequence in batch.sampled:
            chosen = self.choose(_tables(sequence), sequence.num_tokens)
            token = SampledToken((chosen + (not self.has_states(sequence))) % VOCAB)
            if sequence.request_id in self.late_masks:
                self.late_masks.remove(sequence.request_id)
                rows.append(LATE)
            else:
                rows.append(NOT_FINITE if sequence.request_id in self.broken else token)
        return rows


def _next_state(state: int, token: int) -> int:
    return zlib.crc32(f"{state} {token}".encode())


def _record(sequence: Sequence, start: int, size: int) -> None:
    """Report for each token of the prompt that its rank is its token id, and nothing else."""
    if sequence.prompt_record is None:
        sequence.prompt_record = PromptRecord(0)
    followers = sequence.tokens[start + 1 : start + 1 + size]
    ranks = b"".join(each.to_bytes(4, "little") for each in followers)
    sequence.prompt_record.put(start, PromptRows(bytes(len(ranks)), ranks, b"", b""))


def ranks_told(told: PromptLogprobs | None) -> list[int] | None:
    """The ranks that `FakeModel` reported for the tokens of a prompt."""
    return None if told is None else [each.rank for each in told.entries()]
