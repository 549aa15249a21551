"""Fleets that a number of GPUs can make up: pools, GPUs of a worker, chunk budgets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from process.number_text import count

_MOST_SPLITS = 8


@dataclass(frozen=True, order=True)
class Candidate:
    """One fleet. `tp` is the number of GPUs of a worker, `chunk_tokens` the most prompt tokens in a
    step: of prefill workers, or of decode workers if the fleet has no prefill workers."""

    prefill: int
    decode: int
    tp: int
    chunk_tokens: int

    @property
    def splits(self) -> bool:
        """Whether prefill and decode have workers of their own."""
        return self.prefill > 0

    @property
    def num_gpus(self) -> int:
        """The GPUs that the workers use."""
        return (self.prefill + self.decode) * self.tp

    @property
    def name(self) -> str:
        """The fleet in words."""
        pools = f"{self.prefill} prefill + {self.decode} decode"
        if not self.splits:
            pools = f"{self.decode} colocated"
        return f"{pools}, {count(self.tp, 'GPU')} each, chunks of {self.chunk_tokens:,}"

    def with_chunks(self, chunk_tokens: int) -> Candidate:
        """The same workers with another budget."""
        return Candidate(self.prefill, self.decode, self.tp, chunk_tokens)


def fleets(num_gpus: int, tps: Iterable[int], chunk_tokens: int) -> list[Candidate]:
    """One colocated fleet and several splits for each number of GPUs of a worker."""
    found = []
    for tp in tps:
        workers = num_gpus // tp
        for prefill in _spread(workers - 1) if workers else ():
            found.append(Candidate(prefill, workers - prefill, tp, chunk_tokens))
    return found


def _spread(most: int) -> Sequence[int]:
    """A few numbers from 0 to `most`."""
    if most <= _MOST_SPLITS:
        return range(most + 1)
    return sorted({round(most * n / _MOST_SPLITS) for n in range(_MOST_SPLITS + 1)})
