"""KV whose numbers lie apart by their bits: handed over, taken up again and written over, the same
tokens as where they lie by pairs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.native.library import KernelsUnavailable, load_library
from protocol.layout import PAIRS
from tests.effort import NIGHTLY, some
from tests.integration.fleets import complete, counters, running_fleet
from tests.integration.one_engine import tokens_of_one_engine
from tests.integration.random_checkpoints import random_checkpoint
from tests.integration.reference import DEMO_MODEL

NUM_BLOCKS = 40  # of 16 tokens, of which two prompts have no room
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with heads of 64, and the demo's tokenizer."""
    config = Qwen3Config.from_pretrained(DEMO_MODEL)
    config.head_dim, config.num_attention_heads, config.num_key_value_heads = 64, 6, 2
    config.initializer_range = 0.2
    return random_checkpoint(
        tmp_path_factory.mktemp("model"), lambda: Qwen3ForCausalLM(config).to(torch.bfloat16)
    )


def test_orders_give_the_same_tokens(folder: Path) -> None:
    """Of prompts that push each other out."""
    try:
        if not load_library().baton_has_linear():
            pytest.skip("this CPU has no bf16 products")
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    rng = random.Random(9)
    prompts = [[rng.randrange(3, 1800) for _ in range(n)] for n in (15, 330, 16, 401, 65, 250)]
    prompts += [prompts[1], prompts[3], prompts[3] + prompts[0]]
    sizes = {"dtype": "bfloat16", "num_blocks": NUM_BLOCKS, "max_context": 512}
    in_pairs = tokens_of_one_engine(folder, prompts, NUM_TOKENS, kv_order=PAIRS, **sizes)
    assert len({tuple(each) for each in in_pairs}) > 5
    for order in some(("auto", PAIRS), 1):
        with running_fleet(
            model=str(folder),
            kv_order=order,
            local_prefill_threshold_tokens=0,
            transport="nixl",
            **sizes,
        ) as fleet:
            answers = [
                complete(fleet, prompt, model=folder.name, max_tokens=NUM_TOKENS)
                for prompt in prompts
            ]
            assert [each["choices"][0]["token_ids"] for each in answers] == in_pairs
            assert counters(fleet, "decode-1")["handoffs"] >= 8, "but for what was still there"
    if NIGHTLY:
        assert tokens_of_one_engine(folder, prompts, NUM_TOKENS, **sizes) == in_pairs
