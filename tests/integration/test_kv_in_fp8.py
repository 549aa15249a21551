"""KV in fp8 on a CPU: what was prefilled elsewhere goes on as what was prefilled here."""

from __future__ import annotations

import pytest

from engine.native.library import KernelsUnavailable, load_library
from tests.integration.fleets import complete, counters, running_fleet
from tests.integration.one_engine import tokens_of_one_engine
from tests.paths import DEMO_MODEL

PROMPTS = [[(7 * i + n) % 1800 + 3 for i in range(n)] for n in (15, 16, 65, 300)]
NUM_TOKENS = 16


def test_apart_and_together_give_the_same_tokens() -> None:
    try:
        load_library()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    apart = {"local_prefill_threshold_tokens": 0, "transport": "shm"}
    with running_fleet(kv_dtype="fp8", **apart) as fleet:
        answers = [complete(fleet, prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
        assert counters(fleet, "decode-1")["handoffs"] == len(PROMPTS)
    together = tokens_of_one_engine(DEMO_MODEL, PROMPTS, NUM_TOKENS, kv_dtype="fp8")
    assert [each["choices"][0]["token_ids"] for each in answers] == together
