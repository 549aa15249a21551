"""A step under construction: what it computes, and how many more prompt tokens fit in. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from scheduling.batch import Batch, Chunk
from scheduling.sequence import Sequence
from scheduling.step_model import StepCost, StepModel


class ChunkLimits(Protocol):
    """Limits of a step's chunks, in tokens."""

    @property
    def block_size(self) -> int:
        """All chunks except a prompt's last one are whole blocks."""

    @property
    def chunk_min_tokens(self) -> int:
        """The first chunk of a step has at least this many, however little time there is."""

    @property
    def chunk_max_tokens(self) -> int:
        """Limit on all chunks of a step together."""

    @property
    def prompt_max_tokens(self) -> int | None:
        """Limit on one prompt's chunk in a step; None: only the limit on all chunks applies."""


@dataclass(slots=True)
class StepPlan:
    """A step under construction: `batch` has its decodes, and gets its chunks. With `budget_s`
    None, only the limits in tokens apply."""

    batch: Batch
    budget_s: float | None
    limits: ChunkLimits
    model: StepModel
    cost: StepCost = field(init=False)
    num_chunk_tokens: int = 0

    def __post_init__(self) -> None:
        self.cost = self.batch.cost

    def add(self, sequence: Sequence, size: int) -> None:
        """Compute `size` more tokens of `sequence`."""
        start = sequence.num_launched
        self.batch.chunks.append(Chunk(sequence, start, size, start + size == sequence.num_tokens))
        self.cost = self.cost.plus(size, start)
        self.num_chunk_tokens += size

    def chunk_tokens(self, sequence: Sequence, start: int, most: int | None = None) -> int:
        """The number of tokens of `sequence` from `start` that fit into the step: whole blocks, or
        all of the remaining tokens. At most `most`, if it is given: the sequence has no blocks for
        more.

        The first chunk of a step has at least `chunk_min_tokens`, however little slack there is.
        `start` is a block boundary, because every chunk but the last ends on one.
        """
        rest = sequence.num_tokens - start
        limit = min(self.limits.chunk_max_tokens - self.num_chunk_tokens, rest)
        if self.limits.prompt_max_tokens is not None:
            limit = min(limit, self.limits.prompt_max_tokens)
        if most is not None:
            limit = min(limit, most)
        if limit <= 0:
            return 0
        size = limit
        if self.budget_s is not None:
            size = self.model.tokens_within(self.budget_s, self.cost, start, limit)
            if not self.batch.chunks:
                size = min(limit, max(size, self.limits.chunk_min_tokens))
        return size if size == rest else size - size % self.limits.block_size
