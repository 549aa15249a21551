"""The benchmark's count of a step's bytes and operations, against weights that exist."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from bench.engine import limits
from bench.engine.comparison import installed_peers
from bench.engine.limits import bits_per_weight, step_needs
from bench.tools.checkpoints import random_weights
from checkpoint.json_keys import JsonKeys
from engine.checkpoint.config import parse_model_config
from protocol.errors import BatonError

SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 72,
    "vocab_size": 97,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
}


def test_weights_count_in_the_bits_that_the_file_has(tmp_path):
    config = parse_model_config(JsonKeys(SMALL, "config.json"))
    weights = random_weights(SMALL)
    save_file(weights, tmp_path / "model.safetensors")
    assert bits_per_weight(tmp_path) == 16
    needs, half = step_needs(config), step_needs(config, 8.0)
    kv_bytes = 40 * needs.kv_bytes_per_token
    assert half.decode_bytes(4, 10) - kv_bytes == (needs.decode_bytes(4, 10) - kv_bytes) // 2


def test_the_fastest_product_is_the_limit(monkeypatch):
    """Each by itself: one kind of product may stream faster and another compute faster."""
    now = 0.0

    class Layer:
        def __init__(self, seconds_per_row: dict[bool, float]) -> None:
            self.seconds = seconds_per_row

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal now
            now += self.seconds[len(x) == 1]
            return x

    costs = {"streams": {True: 1.0, False: 9.0}, "computes": {True: 3.0, False: 2.0}}
    made = {name: (lambda weight, cost=cost: Layer(cost)) for name, cost in costs.items()}
    monkeypatch.setattr(limits, "_products", lambda: made)
    monkeypatch.setattr(limits.time, "perf_counter", lambda: now)
    monkeypatch.setattr(limits, "_WIDTH", 8)
    found = limits.MachineLimits()
    found.measure()
    found.measure()
    assert (found.fastest_stream, found.fastest_product) == ("streams", "computes")
    assert found.bytes_per_s == 2 * 8 * 8  # of a layer in a second
    assert found.flops_per_s == 2 * 2048 * 8 * 8 / 2.0


def test_needs_count_every_matrix_once():
    needs = step_needs(parse_model_config(JsonKeys(SMALL, "config.json")))
    sizes = {name: w.numel() for name, w in random_weights(SMALL).items() if w.dim() == 2}
    assert needs.head_weights == sizes.pop("model.embed_tokens.weight")
    assert needs.layer_weights == sum(sizes.values())
    kv_bytes = 3 * 2 * 2 * 16 * 2
    assert needs.decode_bytes(4, 10) == 2 * (needs.layer_weights + 48 * 97) + 40 * kv_bytes
    two_tokens = needs.prefill_flops(2) - needs.prefill_flops(1)
    assert two_tokens == 2 * needs.layer_weights + 2 * (2 * 2 * 3 * 6 * 16)


def test_needs_count_the_experts_of_a_token_only():
    shape = {**SMALL, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    shape |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    needs = step_needs(parse_model_config(JsonKeys(shape, "config.json")))
    sizes = {name: w.numel() for name, w in random_weights(shape).items() if w.dim() == 2}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert needs.expert_weights * 8 == experts
    others = needs.layer_weights + needs.head_weights
    assert others == sum(sizes.values()) - experts
    assert needs.decode_bytes(1, 0) == 2 * (others + experts // 4)
    assert 2 * (others + experts * 9 // 10) < needs.decode_bytes(12, 0) < 2 * (others + experts)
    two_tokens = needs.prefill_flops(2) - needs.prefill_flops(1)
    assert two_tokens == 2 * (needs.layer_weights + experts // 4) + 2 * (2 * 2 * 3 * 6 * 16)


def test_a_peer_that_is_not_known_is_named():
    assert installed_peers("", {}) == ([], [])
    with pytest.raises(BatonError, match="fastllm"):
        installed_peers("fastllm", {})
