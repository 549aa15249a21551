"""Small configurations of hybrids for tests, as arguments of transformers' classes."""

from __future__ import annotations

from typing import Any

_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
    },
}
"""Sizes of which few are equal, so that none is taken for another."""
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
_NEMOTRON: dict[str, Any] = {
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 4,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3NextForCausalLM", _DELTA | _EXPERTS),
    "qwen3-next some dense": (
        "Qwen3NextForCausalLM",
        _DELTA
        | _EXPERTS
        | {"mlp_only_layers": [1], "attention_bias": True, "norm_topk_prob": False}
        | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2},
    ),
    "qwen3.5": (
        "Qwen3_5ForCausalLM",
        _DELTA | {"rope_parameters": _DELTA["rope_parameters"] | _MROPE},
    ),
    "qwen3.5 moe": ("Qwen3_5MoeForCausalLM", _DELTA | _EXPERTS),
    "nemotron-h": (
        "NemotronHForCausalLM",
        _NEMOTRON
        | {
            "layers_block_type": [
                "linear_attention",
                "mlp",
                "linear_attention",
                "full_attention",
                "mlp",
                "linear_attention",
            ]
        },
    ),
    "nemotron-h moe": (
        "NemotronHForCausalLM",
        _NEMOTRON
        | {
            "layers_block_type": [
                "linear_attention",
                "moe",
                "linear_attention",
                "full_attention",
                "moe",
                "linear_attention",
                "mlp",
            ],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
    ),
}
