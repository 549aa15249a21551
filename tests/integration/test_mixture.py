"""A trained mixture of experts, served apart: transformers' tokens, and uneven loads.

Trained routers choose unevenly; what random ones would hide shows here.
"""

from __future__ import annotations

import pydoc_data.topics
from itertools import islice

import pytest
from tokenizers import Tokenizer

from cli.fleet import Fleet
from engine.checkpoint.config import load_model_config
from tests.effort import some
from tests.integration.fleets import all_counters, assert_as_expected, complete_all, running_fleet
from tests.integration.reference import MIN_MARGIN, NUM_TOKENS, GreedyGeneration, Reference
from tests.paths import DEMO_MODEL, MIXTURE

LENGTHS = (1, 17, 100)


@pytest.fixture(scope="module")
def expected() -> list[Reference]:
    """Windows of Python's help text, two of each length, with what transformers makes of them."""
    generate = GreedyGeneration(MIXTURE)
    text = pydoc_data.topics.topics["with"] + pydoc_data.topics.topics["lambda"]
    tokens = Tokenizer.from_file(str(MIXTURE / "tokenizer.json")).encode(text).ids

    def clear(length: int):
        for start in range(0, len(tokens) - length, 13):
            prompt = tokens[start : start + length]
            output, margin = generate(prompt)
            if margin >= MIN_MARGIN:
                yield Reference(tuple(prompt), tuple(output))

    return [found for length in LENGTHS for found in islice(clear(length), 2)]


@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"], 1))
def test_a_mixture_served_apart_gives_the_tokens_of_transformers(expected, dtype):
    assert len(expected) == 2 * len(LENGTHS)
    with running_fleet(
        model=str(MIXTURE),
        served_model_name=(DEMO_MODEL.name,),  # as all requests of these tests say
        prefill=1,
        decode=1,
        local_prefill_threshold_tokens=0,
        chunk_max_tokens=32,
        dtype=dtype,
    ) as fleet:
        assert_as_expected(expected, complete_all(fleet, expected, NUM_TOKENS, 8))
        assert all_counters(fleet)["decode-1"]["handoffs"] == len(expected)
        assert_uneven_loads(fleet)


def assert_uneven_loads(fleet: Fleet) -> None:
    config = load_model_config(MIXTURE)
    experts = config.experts
    assert experts is not None
    counters = all_counters(fleet)["prefill-1"]
    # of a chunk, the last layer routes only the tokens whose output is needed
    per_layer = counters["prefill_tokens"] * experts.per_token
    least = (config.num_layers - 1) * per_layer
    assert 0 < least < counters["expert_pairs"] < least + per_layer
    assert counters["busiest_expert_pairs"] * experts.count > 1.2 * counters["expert_pairs"]
    assert 0 < counters["used_experts"] <= counters["expert_pairs"]
