"""Reading the scaling of rotary embeddings in both of transformers' spellings."""

from __future__ import annotations

import math

import pytest

from engine.checkpoint.rope_config import RopeConfig
from tests.unit.engine.checkpoint.configs import LLAMA3, parse


@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"kind": "default"}, {"kind": "default"}),
        ({"kind": "linear", "factor": 2}, {"kind": "linear", "factor": 2.0}),
        ({"kind": "dynamic", "factor": 2.5}, {"kind": "dynamic", "factor": 2.5}),
        (
            {"kind": "llama3", **LLAMA3, "original_max_position_embeddings": 512},
            {"kind": "llama3", **LLAMA3, "original_max_position_embeddings": 512},
        ),
        ({"kind": "yarn", "factor": 4.0}, {"kind": "yarn", "factor": 4.0}),
        (
            {"kind": "yarn", "original_max_position_embeddings": 512},
            {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
        (
            {
                "kind": "yarn",
                "factor": 4.0,
                "attention_factor": 1.2,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.7,
                "mscale_all_dim": 0.0,
                "truncate": False,
            },
            {
                "kind": "yarn",
                "factor": 4.0,
                "attention_factor": 1.2,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "truncate": False,
            },
        ),
        (
            {"kind": "telechat3-yarn", "factor": 8, "attention_factor": 1.2, "beta_fast": 16},
            {"kind": "yarn", "factor": 8.0, "attention_factor": 1.2, "beta_fast": 16.0},
        ),
        ({"kind": "telechat3-yarn"}, {"kind": "yarn", "attention_factor": 1.0}),
        (
            {"kind": "yarn", "factor": 4.0, "attn_factor": 0.5},
            {"kind": "yarn", "factor": 4.0, "attention_factor": 0.5 * (1 + 0.1 * math.log(4.0))},
        ),
        (
            {"kind": "yarn", "factor": 4.0, "attn_factor": 0.5, "attention_factor": 1.2},
            {"kind": "yarn", "factor": 4.0, "attention_factor": 1.2},
        ),
    ],
    ids=str,
)
def test_rope_in_both_spellings(kind_key, spelling, table, expected):
    table = {kind_key if key == "kind" else key: value for key, value in table.items()}
    if spelling == "rope_scaling":
        config = parse(rope_scaling=table, rope_theta=5000)
    else:
        config = parse(rope_parameters={"rope_theta": 5000.0, **table})
    defaults = {
        "theta": 5000.0,
        "max_position_embeddings": 2048,
        "original_max_position_embeddings": 2048,
    }
    assert config.rope == RopeConfig(**(defaults | expected))


def test_files_that_carry_both_spellings():
    config = parse(
        rope_theta=5000,
        rope_scaling=None,
        rope_parameters={"rope_type": "default", "rope_theta": 5000},
    )
    assert config.rope == RopeConfig("default", 5000.0, 2048, 2048)


def test_the_original_context_may_stand_beside_the_table():
    table = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 7}
    rope = parse(rope_scaling=table, original_max_position_embeddings=99).rope
    assert rope.original_max_position_embeddings == 99
