"""The keys of layers with a gated delta rule, from the metadata of a hybrid's file (Qwen3-Next,
Qwen3.5).

llama.cpp's converter reorders the value heads of Qwen3.5, so that key heads serve them by turns.
Layers with full attention are given by their distance, or there is a list of the other layers
(`attention.recurrent_layers`). The converter writes the two halves of a
layer's inputs separately; older files of Qwen3-Next have them together, as checkpoints do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from checkpoint.json_keys import JsonKeys

ARCHITECTURES = {
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
}
_WITH_HEADS_AS_STORED = "qwen3next"
_OLDER_INPUTS = ".ssm_in.weight"


def state_keys(
    keys: JsonKeys, name: str, num_layers: int, rotated_part: float, tensor_names: Iterable[str]
) -> dict[str, Any]:
    """The sizes of these layers, and which part of a head is rotated in the others; none for
    another architecture. Raises ModelLoadError."""
    if name not in ARCHITECTURES:
        return {}
    num_keys = keys.integer(f"{name}.ssm.group_count")
    num_values = keys.integer(f"{name}.ssm.time_step_rank")
    if num_values % num_keys:
        raise keys.wrong(f"{name}.ssm.time_step_rank", f"a multiple of the key heads, {num_keys}")
    inner = keys.integer(f"{name}.ssm.inner_size")
    if inner % num_values:
        raise keys.wrong(f"{name}.ssm.inner_size", f"a multiple of the value heads, {num_values}")
    return {
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": keys.integer(f"{name}.ssm.state_size"),
        "linear_value_head_dim": inner // num_values,
        "linear_conv_kernel_dim": keys.integer(f"{name}.ssm.conv_kernel"),
        **_full_attention(keys, name, num_layers),
        "partial_rotary_factor": rotated_part,
        "keys_by_turns": name != _WITH_HEADS_AS_STORED,
        "qkvz_by_head": any(each.endswith(_OLDER_INPUTS) for each in tensor_names),
    }


def _full_attention(keys: JsonKeys, name: str, num_layers: int) -> dict[str, Any]:
    """Which layers have full attention."""
    key = f"{name}.attention.recurrent_layers"
    if key not in keys:
        return {"full_attention_interval": keys.integer(f"{name}.full_attention_interval", 4)}
    keeps_state = keys.raw(key)
    if not isinstance(keeps_state, list) or len(keeps_state) < num_layers:
        raise keys.wrong(key, f"an array for {num_layers} layers")
    kinds = ("full_attention", "linear_attention")
    return {"layer_types": [kinds[bool(each)] for each in keeps_state[:num_layers]]}
