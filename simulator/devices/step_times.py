"""What a step consists of, and the interface of everything that predicts its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduling.batch import Batch
from scheduling.step_model import attended_pairs


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """The prompt chunks of a step: their tokens, their query-key pairs, and the tokens whose KV
    they read."""

    num_tokens: int = 0
    pairs: int = 0
    read_tokens: int = 0
    num_completed: int = 0


NO_CHUNKS = ChunkWork()


class StepTimes(Protocol):
    """Predicts steps of one model on one kind of worker."""

    def decode_line(self, num_rows: int) -> tuple[float, float]:
        """`(fixed, slope)`: a step in which `num_rows` sequences decode takes
        `fixed + slope * context` seconds, `context` being the sum of their tokens."""
        ...

    def seconds(self, num_rows: int, context: int, chunks: ChunkWork) -> float:
        """The time of a step with chunks."""
        ...


def chunk_work(batch: Batch) -> ChunkWork:
    """The chunks of a batch."""
    if not batch.chunks:
        return NO_CHUNKS
    return ChunkWork(
        batch.num_chunk_tokens,
        sum(attended_pairs(each.num_tokens, each.start) for each in batch.chunks),
        sum(each.start + each.num_tokens for each in batch.chunks),
        sum(each.completes for each in batch.chunks),
    )
