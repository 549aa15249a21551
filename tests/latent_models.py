"""Small configurations of latent attention for tests, as arguments of transformers' classes."""

from __future__ import annotations

from typing import Any

LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
"""Sizes of which no two are equal. Up to 20 queries attend to the latents themselves."""
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
_YARN: dict[str, Any] = {
    "rope_theta": 500.0,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
}
V2 = LATENT | _EXPERTS | {"topk_method": "group_limited_greedy"}
V3 = LATENT | _EXPERTS | {"norm_topk_prob": True}
LATENT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek v2": ("DeepseekV2ForCausalLM", V2),
    "deepseek v2 lite": (
        "DeepseekV2ForCausalLM",
        V2
        | {"q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0}
        | {"n_group": 1, "topk_group": 1}
        | {"rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek v3": (
        "DeepseekV3ForCausalLM",
        V3 | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek v3 unlike scales": (
        "DeepseekV3ForCausalLM",
        V3 | {"rope_parameters": _YARN | {"mscale": 1.5, "mscale_all_dim": 0.5}},
    ),
    "deepseek v3 in halves": ("DeepseekV3ForCausalLM", V3 | {"rope_interleave": False}),
    "deepseek v3 biases": (
        "DeepseekV3ForCausalLM",
        V3 | {"attention_bias": True, "rms_norm_eps": 1e-3},
    ),
    "deepseek v2 biases": (
        "DeepseekV2ForCausalLM",
        V2 | {"attention_bias": True, "q_lora_rank": None, "norm_topk_prob": True},
    ),
    "kimi": (
        "DeepseekV3ForCausalLM",
        V3 | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "q_lora_rank": None},
    ),
    "deepseek v3 dense": ("DeepseekV3ForCausalLM", V3 | {"first_k_dense_replace": 3}),
}
