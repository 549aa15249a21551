"""The works that the engine benchmark measures: prompts, and decode steps of batches.

The same works for an engine in its process and for a server; knows neither.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DECODE_STEPS = 16
CONTEXT = 512
PREFILL_LENGTHS = (512, 2048)
BATCH_SIZES = (1, 8, 32)
SWEEP_BATCH = 8
SWEEP_CONTEXTS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Work:
    """The work of one figure: a prompt of `length` tokens, or decode steps of `batch` sequences
    with `length` tokens each."""

    kind: str
    batch: int
    length: int

    @property
    def label(self) -> str:
        """The name in the table."""
        if self.kind == "prefill":
            return f"prefill {self.length:,}"
        return f"decode {self.batch} at {self.length:,}"

    def num_tokens(self, block_size: int, steps: int = DECODE_STEPS) -> int:
        """Number of tokens that a pool with this block size must hold for `steps` steps, including
        one more block per sequence, which schedulers keep free for decoding."""
        blocks = -(-(self.length + steps + 2) // block_size) + 1
        return self.batch * blocks * block_size


@dataclass(frozen=True)
class EngineNeeds:
    """The needs that an engine is started for: one checkpoint on `threads` cores, sequences of at
    most `max_context` tokens, at most `max_sequences` at once with `num_tokens` in total, and steps
    of at most `step_tokens` prompt tokens, which run before decode steps."""

    folder: Path
    dtype: str
    threads: int
    max_context: int
    max_sequences: int
    num_tokens: int
    kv_bytes_per_token: int
    step_tokens: int

    @property
    def kv_gib(self) -> int:
        """The KV of `num_tokens` tokens in GiB, rounded up."""
        return -(-self.num_tokens * self.kv_bytes_per_token // 2**30)


Run = Callable[[Work, random.Random], float]
"""Runs a work on prompts from the generator; returns tokens per second."""

WORKS = [Work("prefill", 1, n) for n in PREFILL_LENGTHS]
WORKS += [Work("decode", n, CONTEXT) for n in BATCH_SIZES]
SWEEP = [Work("decode", SWEEP_BATCH, context) for context in SWEEP_CONTEXTS]


def longest(works: list[Work], steps: int = DECODE_STEPS) -> int:
    """The most tokens of any one sequence."""
    return max(work.length for work in works) + steps + 2
