"""The benchmark's count of a step's bytes and operations, against weights that exist."""

from __future__ import annotations

import pytest

from bench.engine.comparison import installed_peers
from bench.engine.limits import step_needs
from bench.tools.checkpoints import random_weights
from engine.checkpoint.config import parse_model_config
from engine.checkpoint.json_keys import JsonKeys
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


def test_needs_count_every_matrix_once():
    needs = step_needs(parse_model_config(JsonKeys(SMALL, "config.json")))
    sizes = {name: w.numel() for name, w in random_weights(SMALL).items() if w.dim() == 2}
    assert needs.head_weights == sizes.pop("model.embed_tokens.weight")
    assert needs.layer_weights == sum(sizes.values())
    kv_bytes = 3 * 2 * 2 * 16 * 2
    assert needs.decode_bytes(4, 10) == 2 * (needs.layer_weights + 48 * 97) + 40 * kv_bytes
    two_tokens = needs.prefill_flops(2) - needs.prefill_flops(1)
    assert two_tokens == 2 * needs.layer_weights + 2 * (2 * 2 * 3 * 6 * 16)


def test_a_peer_that_is_not_known_is_named():
    assert installed_peers("", {}) == ([], [])
    with pytest.raises(BatonError, match="fastllm"):
        installed_peers("fastllm", {})
