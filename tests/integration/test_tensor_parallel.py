"""Workers whose model is split over ranks hand over to workers of any ranks: the same tokens as
transformers gives, in fp32, with every block compared by digest."""

from __future__ import annotations

import pytest

from tests.effort import some
from tests.integration.fleets import (
    assert_as_expected,
    complete_all,
    counters,
    running_fleet,
)
from tests.integration.reference import NUM_TOKENS, Reference

CONCURRENCY = 8


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    some([(2, 1, "nixl"), (1, 2, "shm"), (2, 2, "nixl"), (2, 1, "shm"), (1, 2, "nixl")], 3),
)
def test_tokens_are_those_of_one_rank(
    references: list[Reference], prefill: int, decode: int, transport: str
) -> None:
    settings = {
        "prefill_tensor_parallel": prefill,
        "decode_tensor_parallel": decode,
        "transport": transport,
        "dtype": "float32",
        "chunk_max_tokens": 64,
        "local_prefill_threshold_tokens": 0,
    }
    with running_fleet({"BATON_KV_CHECKSUM": "on"}, **settings) as fleet:
        answers = complete_all(fleet, references, NUM_TOKENS, CONCURRENCY)
        assert_as_expected(references, answers)
        assert counters(fleet, "decode-1")["handoffs"] == len(references)
