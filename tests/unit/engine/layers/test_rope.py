"""cos and sin against transformers' own functions, and as a function of the position alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from checkpoint.json_keys import JsonKeys
from engine.checkpoint.rope_config import parse_rope
from engine.layers.rope import Rope, rotate

HEAD_DIM, MAX_POSITIONS = 32, 4096
KINDS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256},
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 20.0,
        "beta_slow": 3.0,
        "attention_factor": 0.8,
    },
]


def make_rope(table: dict[str, Any], max_positions: int = MAX_POSITIONS) -> Rope:
    keys = JsonKeys({"rope_parameters": {"rope_theta": 10_000.0, **table}}, "config.json")
    return Rope(parse_rope(keys, max_positions), HEAD_DIM, "cpu")


@pytest.mark.parametrize("table", KINDS, ids=str)
def test_equal_to_transformers_over_the_whole_context(table):
    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": 10_000.0, **table},
    )
    if table["rope_type"] == "default":
        frequencies = 1.0 / 10_000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        scale = 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[table["rope_type"]](config, "cpu")
    positions = torch.arange(MAX_POSITIONS)
    angles = positions[:, None].float() * frequencies
    cos, sin = make_rope(table).cos_sin(positions, torch.float32)
    assert cos.shape == sin.shape == (MAX_POSITIONS, HEAD_DIM // 2)
    # fp32 angles near 4096 have steps of 5e-4: equal formulas in another order differ as much
    torch.testing.assert_close(cos, angles.cos() * scale, rtol=0, atol=6e-4)
    torch.testing.assert_close(sin, angles.sin() * scale, rtol=0, atol=6e-4)


@pytest.mark.parametrize("table", KINDS, ids=str)
def test_a_pure_function_of_the_position(table):
    """Bit for bit the same, alone or among others, also beyond the trained length."""
    rope = make_rope(table, max_positions=100)
    positions = torch.tensor([0, 3, 99, 100, 101, 7, 250, 3000])
    together = rope.cos_sin(positions, torch.float32)
    for row, position in enumerate(positions):
        alone = rope.cos_sin(position[None], torch.float32)
        assert torch.equal(alone[0][0], together[0][row])
        assert torch.equal(alone[1][0], together[1][row])


def test_dynamic_frequencies_stretch_only_beyond_the_trained_length():
    positions = torch.tensor([5, 99, 100, 400])
    dynamic = make_rope(KINDS[2], max_positions=100).cos_sin(positions, torch.float32)[0]
    plain = make_rope(KINDS[0], max_positions=100).cos_sin(positions, torch.float32)[0]
    torch.testing.assert_close(dynamic[:2], plain[:2])
    assert (dynamic[2:] - plain[2:]).abs().amax(-1).min() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_turns_each_plane_by_its_angle(dtype):
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn((5, 3, HEAD_DIM), generator=generator).to(dtype)
    rope = make_rope(KINDS[0])
    cos, sin = rope.cos_sin(torch.arange(5), dtype)
    turned = rotate(heads, cos, sin)
    assert turned.dtype == dtype
    half = HEAD_DIM // 2
    planes = torch.complex(heads[..., :half].float(), heads[..., half:].float())
    expected = planes * torch.complex(cos.float(), sin.float())[:, None]
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(turned[..., :half].float(), expected.real, rtol=0, atol=tolerance)
    torch.testing.assert_close(turned[..., half:].float(), expected.imag, rtol=0, atol=tolerance)
    torch.testing.assert_close(turned[0], heads[0])  # position 0 is not turned


@pytest.mark.parametrize("table", KINDS, ids=str)
def test_tables_are_what_is_computed_for_each_position_and_grow(table):
    rope = make_rope(table, max_positions=256)
    for length in (1, 300, 4097, 9000):
        cos, sin = rope.tables(length)
        assert len(cos) == len(sin) >= length
        positions = torch.tensor([0, length - 1, length // 2])
        for tabled, computed in zip(
            (cos, sin), rope.cos_sin(positions, torch.float32), strict=True
        ):
            # torch's power rounds by where in its argument a number stands
            atol = 2e-3 if table["rope_type"] == "dynamic" else 0.0
            torch.testing.assert_close(tabled[positions], computed, rtol=0.0, atol=atol)
    assert rope.tables(5)[0] is cos, "a shorter context has what is there"
