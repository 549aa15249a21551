"""Workers of four ranks in each stage, of which two have the same KV head, hand over to workers of
any others, and take over from them: transformers' tokens in fp32."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.integration.fleets import (
    assert_as_expected,
    complete_all,
    counters,
    rank_settings,
    running_fleet,
)
from tests.integration.random_checkpoints import NUM_TOKENS, SIZES, Expected, random_checkpoint
from tests.integration.reference import Reference

pytestmark = pytest.mark.nightly

LENGTHS = (1, 16, 17, 63, 150, 257)
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]
"""Ranks of each layer, and stages."""
PAIRS = [
    pair for pair in itertools.product(LAYOUTS, LAYOUTS) if any(ranks == 4 for ranks, _ in pair)
]
"""Of a prefill and a decode worker."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint whose heads four ranks can share out, and the demo's tokenizer."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    make = partial(Qwen3ForCausalLM, Qwen3Config(**SIZES, **heads, num_hidden_layers=3))
    return random_checkpoint(tmp_path_factory.mktemp("model"), make)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[Reference]:
    """On which no two logits are near each other."""
    expected = Expected(folder)
    return [expected.after((), length) for length in LENGTHS]


@pytest.mark.parametrize("transport", ["nixl", "shm"])
@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=str)
def test_tokens_are_those_of_one_rank(
    folder: Path,
    prompts: list[Reference],
    prefill: tuple[int, int],
    decode: tuple[int, int],
    transport: str,
) -> None:
    with running_fleet(
        {"BATON_KV_CHECKSUM": "on"},
        model=str(folder),
        transport=transport,
        dtype="float32",
        chunk_max_tokens=64,
        local_prefill_threshold_tokens=0,
        startup_timeout_s=240.0,  # each rank imports torch
        **rank_settings(prefill, decode),
    ) as fleet:
        assert_as_expected(prompts, complete_all(fleet, prompts, NUM_TOKENS, at_once=4))
        assert counters(fleet, "decode-1")["handoffs"] == len(prompts)
