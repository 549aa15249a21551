"""A trained mixture of experts, served apart: transformers' tokens, and uneven loads.

Trained routers choose unevenly; what random ones would hide shows here.
"""

from __future__ import annotations

import pytest

from cli.fleet import Fleet
from engine.checkpoint.config import load_model_config
from tests.effort import some, times
from tests.integration.fleets import all_counters, assert_as_expected, complete_all, running_fleet
from tests.integration.reference import NUM_TOKENS, Reference, clear_references
from tests.paths import DEMO_MODEL, MIXTURE

LENGTHS = (1, 17, 100)


@pytest.fixture(scope="module")
def expected() -> list[Reference]:
    return clear_references(MIXTURE, LENGTHS, times(1, 2))


@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"], 1))
def test_a_mixture_served_apart_gives_the_tokens_of_transformers(expected, dtype):
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
