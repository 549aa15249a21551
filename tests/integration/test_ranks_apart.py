"""Workers whose ranks each have a pool and an end of their own, as on cards, hand over to workers
of any ranks, and take over from them: transformers' tokens in fp32."""

from __future__ import annotations

import itertools

import pytest

from bench.tools import worker_apart
from tests.effort import NIGHTLY, some, times
from tests.integration.fleets import (
    assert_as_expected,
    complete_all,
    counters,
    rank_settings,
    running_fleet,
)
from tests.integration.reference import NUM_TOKENS, Reference

LONGEST = times(300, 2000)
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Ranks of each layer, and stages."""
EVERYDAY = [((2, 1), (1, 2))]
ALL = [each for each in itertools.product(LAYOUTS, LAYOUTS) if each != ((1, 1),) * 2]


@pytest.mark.parametrize(("prefill", "decode"), ALL if NIGHTLY else EVERYDAY)
def test_tokens_are_those_of_one_rank(
    references: list[Reference], prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    prompts = some([each for each in references if len(each.prompt) <= LONGEST], 8)
    with running_fleet(
        module=worker_apart.__name__,
        transport="nixl",
        dtype="float32",
        chunk_max_tokens=64,
        local_prefill_threshold_tokens=0,
        **rank_settings(prefill, decode),
    ) as fleet:
        answers = complete_all(fleet, prompts, NUM_TOKENS, 8)
        assert_as_expected(prompts, answers)
        found = counters(fleet, "decode-1")
        assert found["handoffs"] == len(prompts)
        assert found["blocks_received"] == counters(fleet, "prefill-1")["blocks_sent"]
