"""The parts of a step that determine its time, and the interface of predictors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduling.batch import Batch
from scheduling.step_model import attended_pairs


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """The prompt chunks of a step: their tokens, their query-key pairs, and the tokens whose KV
    they read. `within` has pairs and read tokens of layers with each window."""

    num_tokens: int = 0
    pairs: int = 0
    read_tokens: int = 0
    num_completed: int = 0
    within: tuple[tuple[int, int], ...] = ()


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


def chunk_work(batch: Batch, windows: Sequence[int] = ()) -> ChunkWork:
    """The chunks of a batch, of a model with these windows."""
    if not batch.chunks:
        return NO_CHUNKS
    return ChunkWork(
        batch.num_chunk_tokens,
        sum(attended_pairs(each.num_tokens, each.start) for each in batch.chunks),
        sum(each.start + each.num_tokens for each in batch.chunks),
        sum(each.completes for each in batch.chunks),
        tuple(_within(window, batch) for window in windows),
    )


def _within(window: int, batch: Batch) -> tuple[int, int]:
    """The pairs and read tokens of a batch's chunks in a layer with a window."""
    pairs = read = 0
    for each in batch.chunks:
        num_short = min(each.num_tokens, max(0, window - each.start))  # see all before them
        pairs += attended_pairs(num_short, each.start) + (each.num_tokens - num_short) * window
        read += min(each.start, window - 1) + each.num_tokens
    return pairs, read
