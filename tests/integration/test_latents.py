"""Latent attention, served by prefill and decode apart: transformers' tokens, and the formula's
bytes on the way."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.effort import some
from tests.integration.fleets import (
    assert_as_expected,
    complete,
    complete_all,
    counters,
    rank_settings,
    running_fleet,
    trace_of,
)
from tests.integration.random_checkpoints import NUM_TOKENS, SIZES, Expected, random_checkpoint
from tests.integration.reference import BLOCK, Reference
from tests.latent_models import V3

LENGTHS = (1, 17, 64, 150)
LATENT_DIM = V3["kv_lora_rank"] + V3["qk_rope_head_dim"]
NUM_LAYERS, FP32_BYTES = 3, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of DeepSeek V3's kind, and the demo's tokenizer."""
    sizes = {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": 6, "moe_intermediate_size": 48}
    make = partial(DeepseekV3ForCausalLM, DeepseekV3Config(**(V3 | SIZES | sizes)))
    return random_checkpoint(tmp_path_factory.mktemp("model"), make)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Reference]:
    prompts = Expected(folder)
    return [prompts.after((), length) for length in LENGTHS]


RANKS = [((2, 1), (1, 1)), ((1, 1), (1, 1)), ((1, 1), (2, 2)), ((3, 1), (1, 2)), ((2, 1), (2, 1))]
"""Ranks of a layer and stages of the prefill and of the decode worker."""


@pytest.mark.parametrize("transport", some(["nixl", "shm"], 1))
@pytest.mark.parametrize(("prefill", "decode"), some(RANKS, 1))
def test_apart_they_give_the_tokens_of_transformers(
    folder: Path,
    expected: list[Reference],
    prefill: tuple[int, int],
    decode: tuple[int, int],
    transport: str,
) -> None:
    """However many ranks have a copy of each latent, it is sent once."""
    with running_fleet(
        model=str(folder),
        prefill=1,
        decode=1,
        transport=transport,
        local_prefill_threshold_tokens=0,
        chunk_max_tokens=32,
        dtype="float32",
        **rank_settings(prefill, decode),
    ) as fleet:
        assert_as_expected(expected, complete_all(fleet, expected, NUM_TOKENS, 2))
        blocks = sum(-(-length // BLOCK) for length in LENGTHS)
        assert counters(fleet, "prefill-1")["blocks_sent"] == blocks
        assert counters(fleet, "decode-1")["handoffs"] == len(expected)
        answer = complete(fleet, list(range(100, 133)), max_tokens=2)
        prefill = trace_of(fleet, answer["id"])["attempts"][-1]["prefill"]
        num_values = NUM_LAYERS * BLOCK * LATENT_DIM
        assert prefill["bytes_moved"] == 3 * num_values * FP32_BYTES
