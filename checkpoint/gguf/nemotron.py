"""The keys of Nemotron-H, from a file of `nemotron_h` (dense) or `nemotron_h_moe`.

Each block of a file is a state space, attention, a dense feed-forward layer or a mixture. The
block's tensors say which: lists in the metadata do, too, but published files have wrong ones
(llama.cpp#27718). Attention is not rotated, so it does not matter that the converter may reorder
the rows of q and k in the same way. Files say nothing of limits of the steps; llama.cpp has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoint.gguf.header import GgufTensor
from checkpoint.json_keys import JsonKeys
from protocol.errors import ModelLoadError

ARCHITECTURES = dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "NemotronHForCausalLM")
_KINDS = {
    "ssm_in.weight": "linear_attention",
    "attn_q.weight": "full_attention",
    "ffn_gate_inp.weight": "moe",
    "ffn_up.weight": "mlp",
}
"""The kind of a block by a tensor that only blocks of this kind have."""

Tensors = Mapping[str, GgufTensor]


def keys_of_blocks(keys: JsonKeys, name: str, num_blocks: int, tensors: Tensors) -> dict[str, Any]:
    """All keys that are not every architecture's, for the first `num_blocks` blocks. Raises
    ModelLoadError."""
    kinds = [_kind(keys, number, tensors) for number in range(num_blocks)]
    experts = _experts(keys, name) if "moe" in kinds else {}
    inner = experts.get("moe_intermediate_size", 1)  # required, but no block uses it
    if "mlp" in kinds:
        inner = _rows(tensors, f"blk.{kinds.index('mlp')}.ffn_up.weight")
    return {
        "architectures": [ARCHITECTURES[name]],
        "layers_block_type": kinds,
        "intermediate_size": inner,
        "layer_norm_epsilon": keys.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "mlp_bias": any(each.endswith(".ffn_up.bias") for each in tensors),
        "is_gguf": True,
        **_attention(keys, name, kinds, tensors),
        **_states(keys, name, tensors),
        **experts,
    }


def _kind(keys: JsonKeys, number: int, tensors: Tensors) -> str:
    found = [kind for name, kind in _KINDS.items() if f"blk.{number}.{name}" in tensors]
    if len(found) != 1:
        names = ", ".join(_KINDS)
        raise ModelLoadError(f"{keys.where}: block {number} must have exactly one of {names}")
    return found[0]


def _attention(keys: JsonKeys, name: str, kinds: list[str], tensors: Tensors) -> dict[str, Any]:
    num_heads = keys.integer(f"{name}.attention.head_count")
    hidden = keys.integer(f"{name}.embedding_length")
    head_dim = keys.integer(f"{name}.attention.key_length", max(hidden // num_heads, 1))
    found = {"num_attention_heads": num_heads, "num_key_value_heads": 1, "head_dim": head_dim}
    if "full_attention" in kinds:
        first = f"blk.{kinds.index('full_attention')}"
        found["num_key_value_heads"] = max(_rows(tensors, f"{first}.attn_k.weight") // head_dim, 1)
    return found | {"attention_bias": any(each.endswith(".attn_q.bias") for each in tensors)}


def _states(keys: JsonKeys, name: str, tensors: Tensors) -> dict[str, Any]:
    num_heads = keys.integer(f"{name}.ssm.time_step_rank")
    inner = keys.integer(f"{name}.ssm.inner_size")
    if inner % num_heads:
        raise keys.wrong(f"{name}.ssm.inner_size", f"a multiple of the heads, {num_heads}")
    return {
        "mamba_num_heads": num_heads,
        "mamba_head_dim": inner // num_heads,
        "n_groups": keys.integer(f"{name}.ssm.group_count"),
        "ssm_state_size": keys.integer(f"{name}.ssm.state_size"),
        "conv_kernel": keys.integer(f"{name}.ssm.conv_kernel"),
        "use_conv_bias": any(each.endswith(".ssm_conv1d.bias") for each in tensors),
    }


def _experts(keys: JsonKeys, name: str) -> dict[str, Any]:
    latent = f"{name}.moe_latent_size"
    if latent in keys:
        raise keys.wrong(latent, "absent (experts of latents are not supported)")
    shared = f"{name}.expert_shared_feed_forward_length"
    return {
        "n_routed_experts": keys.integer(f"{name}.expert_count"),
        "num_experts_per_tok": keys.integer(f"{name}.expert_used_count"),
        "moe_intermediate_size": keys.integer(f"{name}.expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.integer(shared, 0, minimum=0),
        "norm_topk_prob": keys.flag(f"{name}.expert_weights_norm", False),
        "routed_scaling_factor": keys.number(f"{name}.expert_weights_scale", 1.0),
        "n_group": keys.integer(f"{name}.expert_group_count", 1),
        "topk_group": keys.integer(f"{name}.expert_group_used_count", 1),
    }


def _rows(tensors: Tensors, name: str) -> int:
    return tensors[name].shape[0] if name in tensors else 1  # a missing one is named at load
