"""What the engine benchmark's figures measure: prompts, and decode steps of batches.

The same works for an engine in its process and for a server; knows of neither.
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
    """What one figure measures: a prompt of `length` tokens, or decode steps of `batch` sequences
    that have `length` tokens each."""

    kind: str
    batch: int
    length: int

    @property
    def label(self) -> str:
        """As the table shows it."""
        if self.kind == "prefill":
            return f"prefill {self.length:,}"
        return f"decode {self.batch} at {self.length:,}"

    def num_tokens(self, block_size: int, steps: int = DECODE_STEPS) -> int:
        """That a pool of such blocks has to hold, if `steps` steps are taken, and a block more of
        each sequence, which schedulers leave free for those that decode."""
        blocks = -(-(self.length + steps + 2) // block_size) + 1
        return self.batch * blocks * block_size


@dataclass(frozen=True)
class EngineNeeds:
    """What an engine is started for: one checkpoint on `threads` cores, sequences of at most
    `max_context` tokens, `max_sequences` of them at once with `num_tokens` in all, and steps of at
    most `step_tokens` tokens of prompts, which go before decode steps."""

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
        """Whole GiB that hold the keys and values of `num_tokens` tokens."""
        return -(-self.num_tokens * self.kv_bytes_per_token // 2**30)


Run = Callable[[Work, random.Random], float]
"""Does a work on prompts of that generator; tokens per second."""

WORKS = [Work("prefill", 1, n) for n in PREFILL_LENGTHS]
WORKS += [Work("decode", n, CONTEXT) for n in BATCH_SIZES]
SWEEP = [Work("decode", SWEEP_BATCH, context) for context in SWEEP_CONTEXTS]


def longest(works: list[Work], steps: int = DECODE_STEPS) -> int:
    """Tokens of one sequence, at most."""
    return max(work.length for work in works) + steps + 2
