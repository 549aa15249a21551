"""Workers whose model is split over ranks and stages hand over to workers of any others: the same
tokens as transformers gives, in fp32, with every block compared by digest."""

from __future__ import annotations

import itertools

import pytest

from tests.effort import NIGHTLY, some, times
from tests.integration.fleets import (
    assert_as_expected,
    complete_all,
    counters,
    rank_settings,
    running_fleet,
)
from tests.integration.reference import NUM_TOKENS, Reference

CONCURRENCY = 8
LONGEST = times(300, 2000)
EVERYDAY_PROMPTS = 8
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Ranks of each layer, and stages."""
EVERYDAY = [
    ((2, 1), (1, 2), "nixl"),
    ((1, 2), (2, 1), "shm"),
    ((2, 2), (1, 1), "shm"),
    ((1, 1), (2, 2), "nixl"),
]
ALL = [
    each
    for each in itertools.product(LAYOUTS, LAYOUTS, ["nixl", "shm"])
    if each[:2] != ((1, 1),) * 2
]


@pytest.mark.parametrize(("prefill", "decode", "transport"), ALL if NIGHTLY else EVERYDAY)
def test_tokens_are_those_of_one_rank(
    references: list[Reference], prefill: tuple[int, int], decode: tuple[int, int], transport: str
) -> None:
    settings = {
        **rank_settings(prefill, decode),
        "transport": transport,
        "dtype": "float32",
        "chunk_max_tokens": 64,
        "local_prefill_threshold_tokens": 0,
    }
    fitting = [each for each in references if len(each.prompt) <= LONGEST]
    prompts = some(fitting, EVERYDAY_PROMPTS)
    with running_fleet({"BATON_KV_CHECKSUM": "on"}, **settings) as fleet:
        answers = complete_all(fleet, prompts, NUM_TOKENS, CONCURRENCY)
        assert_as_expected(prompts, answers)
        assert counters(fleet, "decode-1")["handoffs"] == len(prompts)
