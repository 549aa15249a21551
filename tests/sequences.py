"""Sequences for tests to which most fields of a request do not matter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from protocol.sampling import SamplingParams
from scheduling.sequence import Sequence


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    """Parameters that choose the likeliest token each time, up to `max_tokens` of them."""
    return SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, **fields)


def sequence_of(
    prompt: Iterable[int], params: SamplingParams, block_size: int, **changes: Any
) -> Sequence:
    """A sequence whose prompt is not computed yet, without a deadline. `changes` replace its
    fields."""
    tokens = list(prompt)
    fields: dict[str, Any] = {
        "request_id": "r",
        "attempt": 0,
        "num_prompt": len(tokens),
        "root_hash": b"root",
        "arrival": 0.0,
        "deadline": float("inf"),
    }
    return Sequence(tokens=tokens, sampling=params, block_size=block_size, **(fields | changes))
