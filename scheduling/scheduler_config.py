"""Limits of a scheduler's steps, and of what it admits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step.

    - `prompt_max_tokens`: no chunk has more; None: no limit but `chunk_max_tokens`, which all
      chunks of a step have together.
    - `even_steps`: steps take no longer than one of `chunk_max_tokens` without context, so that
      the stages of a pipeline do not wait for one another.
    - `itl_target_s`: prefill must keep the inter-token latency below it.
    - `target_share`: the part of the pool that `TargetShares` allows for one target.
    - `aging_s`: the waiting time that is worth one step of priority.
    """

    block_size: int
    max_batch_size: int = 64
    chunk_min_tokens: int = 16
    chunk_max_tokens: int = 512
    itl_target_s: float = 0.05
    headroom_per_sequence: int = 1
    max_preemptions: int = 3
    target_share: float = 0.5
    aging_s: float = 3.0
    prompt_max_tokens: int | None = None
    even_steps: bool = False

    def __post_init__(self) -> None:
        for name in ("chunk_min_tokens", "chunk_max_tokens", "prompt_max_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < self.block_size:
                raise ValueError(f"{name} must be at least the block size, {self.block_size}")
