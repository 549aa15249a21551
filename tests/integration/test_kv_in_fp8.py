"""KV in fp8 on a CPU: what was prefilled elsewhere goes on as what was prefilled here."""

from __future__ import annotations

from typing import Any

import pytest

from engine.native.library import KernelsUnavailable, load_library
from tests.integration.fleets import complete, counters, running_fleet

PROMPTS = [[(7 * i + n) % 1800 + 3 for i in range(n)] for n in (15, 16, 65, 300)]


def tokens(path: dict[str, Any]) -> tuple[list[list[int]], int]:
    """Greedy tokens of each prompt alone, and how many of them were handed over."""
    with running_fleet(kv_dtype="fp8", **path) as fleet:
        answers = [complete(fleet, prompt, max_tokens=16) for prompt in PROMPTS]
        handoffs = counters(fleet, "decode-1")["handoffs"]
    return [answer["choices"][0]["token_ids"] for answer in answers], handoffs


def test_apart_and_together_give_the_same_tokens() -> None:
    try:
        load_library()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    apart, handed_over = tokens({"local_prefill_threshold_tokens": 0, "transport": "shm"})
    together, none = tokens({"prefill": 0})
    assert apart == together
    assert (handed_over, none) == (len(PROMPTS), 0)
