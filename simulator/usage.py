"""Counts of a simulated worker: its steps, its tokens, and the time between tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log


@dataclass(slots=True)
class Usage:
    """The counts of a worker so far. `prefill_s` is the time of steps with prompt chunks,
    `decode_s` that of all other steps. `gaps` has the number of decoded tokens by buckets of the
    logarithm of their steps' time."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_preemptions: int = 0
    gaps: dict[int, int] = field(default_factory=dict)

    def note_gap(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` came `seconds` after the ones before them."""
        bucket = round(log(seconds) * GAP_BUCKETS)
        self.gaps[bucket] = self.gaps.get(bucket, 0) + num_tokens


GAP_BUCKETS = 50
"""Buckets in a factor of e: gaps in one bucket differ by 2 %."""
