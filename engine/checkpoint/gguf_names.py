"""Hugging Face's names of the tensors in a GGUF file; imports no torch.

llama.cpp's names are those of the architectures that Baton loads. A tensor without a counterpart
keeps its name.
"""

from __future__ import annotations

import re

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "post_attention_norm": "post_attention_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_ffw_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_CHOICE_BIAS = "exp_probs_b", "mlp.gate.e_score_correction_bias"
_HEAD_BY_HEAD = re.compile(r".+\.self_attn\.[kv]_b_proj\.weight")
_SINKS = re.compile(r"blk\.(\d+)\.attn_sinks\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hugging_face_name(name: str) -> str:
    """Hugging Face's name of the tensor that llama.cpp calls `name`."""
    if sinks := _SINKS.fullmatch(name):
        return f"model.layers.{sinks[1]}.self_attn.sinks"
    match = _LAYER.fullmatch(name)
    if match is not None and match[2] == _CHOICE_BIAS[0]:
        return f"model.layers.{match[1]}.{_CHOICE_BIAS[1]}"
    if match is None or match[2] not in _OF_LAYER:
        return _WHOLE.get(name, name)
    return f"model.layers.{match[1]}.{_OF_LAYER[match[2]]}.{match[3]}"


def matrix_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor by Hugging Face's name, with the rows of all heads one below the other
    where the file has a matrix for each head."""
    if len(shape) == 3 and _HEAD_BY_HEAD.fullmatch(name):
        return (shape[0] * shape[1], shape[2])
    return shape
