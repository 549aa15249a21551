"""The keys of latent attention and of DeepSeek's experts, from the metadata of a `deepseek2` file.

Files hold the matrix from latents to heads in one of two forms: as one tensor, like checkpoints, or
as one tensor for keys and one for values. If a file has both, the first is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from checkpoint.json_keys import JsonKeys

NAME = "deepseek2"
_SOFTMAX, _SIGMOID = 1, 2
_CHOICE_BIAS = ".exp_probs_b.bias"


def architecture(keys: JsonKeys, tensor_names: Iterable[str]) -> str:
    """The architecture's name: V3's if the experts are not chosen and weighted as in V2."""
    normalizes = keys.flag(f"{NAME}.expert_weights_norm", False)
    is_v3 = normalizes or any(name.endswith(_CHOICE_BIAS) for name in tensor_names)
    return "DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"


def attention_keys(keys: JsonKeys, tensor_names: Iterable[str]) -> dict[str, Any]:
    """The sizes of latent attention. Raises ModelLoadError."""
    rope_dim = keys.integer(f"{NAME}.rope.dimension_count")
    key_length, value_length = "attention.key_length", "attention.value_length"
    if f"{NAME}.{key_length}_mla" in keys:  # the other keys are then those of latents
        key_length, value_length = f"{key_length}_mla", f"{value_length}_mla"
    key_dim = keys.integer(f"{NAME}.{key_length}")
    if key_dim <= rope_dim:
        raise keys.wrong(f"{NAME}.{key_length}", f"more than {rope_dim}, the rotated part")
    return {
        "q_lora_rank": keys.integer(f"{NAME}.attention.q_lora_rank", None),
        "kv_lora_rank": keys.integer(f"{NAME}.attention.kv_lora_rank"),
        "qk_nope_head_dim": key_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": keys.integer(f"{NAME}.{value_length}"),
        "kv_b_in_parts": "blk.0.attn_kv_b.weight" not in set(tensor_names),
    }


def expert_keys(keys: JsonKeys, num_layers: int, tensor_names: Iterable[str]) -> dict[str, Any]:
    """The keys of a mixture of experts, or the keys that mark all layers as dense. Raises
    ModelLoadError."""
    count = keys.integer(f"{NAME}.expert_count", 0, minimum=0)
    if not count:
        return {"first_k_dense_replace": num_layers}
    gating = keys.integer(f"{NAME}.expert_gating_func", _SOFTMAX, minimum=0)
    if gating not in (0, _SOFTMAX, _SIGMOID):
        raise keys.wrong(f"{NAME}.expert_gating_func", f"{_SOFTMAX} (softmax) or {_SIGMOID}")
    groups = keys.integer(f"{NAME}.expert_group_count", 1)
    method = "greedy" if groups == 1 else "group_limited_greedy"
    if any(name.endswith(_CHOICE_BIAS) for name in tensor_names):
        method = "noaux_tc"
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": keys.integer(f"{NAME}.expert_used_count"),
        "moe_intermediate_size": keys.integer(f"{NAME}.expert_feed_forward_length"),
        "n_shared_experts": keys.integer(f"{NAME}.expert_shared_count", 0, minimum=0),
        "first_k_dense_replace": keys.integer(f"{NAME}.leading_dense_block_count", 0, minimum=0),
        "norm_topk_prob": keys.flag(f"{NAME}.expert_weights_norm", False),
        "routed_scaling_factor": keys.number(f"{NAME}.expert_weights_scale", 1.0),
        "scoring_func": "sigmoid" if gating == _SIGMOID else "softmax",
        "topk_method": method,
        "n_group": groups,
        "topk_group": keys.integer(f"{NAME}.expert_group_used_count", 1),
    }


def yarn_keys(keys: JsonKeys) -> dict[str, Any]:
    """YaRN's scales: none on the rotated numbers, and a factor on all scores. A file's factor is a
    tenth of the checkpoint's."""
    tenth = keys.number(f"{NAME}.rope.scaling.yarn_log_multiplier", None, above=-1e-9)
    return {"attention_factor": 1.0, "mscale_all_dim": 10 * (tenth or 0.0)}
