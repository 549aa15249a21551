"""A config.json with changes, as `parse_model_config` reads it."""

from __future__ import annotations

import json
from typing import Any

from checkpoint.json_keys import JsonKeys
from engine.checkpoint.config import parse_model_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
"""Of mixtures."""
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MAMBA = {
    "hybrid_override_pattern": "M-*-",
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 4,
}
WITHOUT = "(left out)"


def parse(**changes: Any):
    values = {key: value for key, value in (BASE | changes).items() if value is not WITHOUT}
    return parse_model_config(JsonKeys(values, "config.json"))


def qwen(name: str = "Qwen2", **changes: Any):
    return parse(architectures=[f"{name}ForCausalLM"], head_dim=8, **changes)


SLIDING, FULL = "sliding_attention", "full_attention"


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def write(folder, name: str, value: Any) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    (folder / name).write_text(text, encoding="utf-8")
