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
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_experts_gate",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_WITHOUT_KIND = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "attn_sinks.weight": "self_attn.sinks",
    "ssm_a": "linear_attn.rates",
    "ssm_d": "linear_attn.D",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
"""Names of tensors of a layer that do not end as llama.cpp's do."""
_OURS = {theirs: name for names in (_OF_LAYER, _WITHOUT_KIND) for name, theirs in names.items()}
_OUR_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OUR_EXPERT = re.compile(r"(mlp\.experts)\.\d+\.(\w+)")
_HEAD_BY_HEAD = re.compile(r".+\.self_attn\.[kv]_b_proj\.weight")
_CONVOLUTION = re.compile(r".+\.linear_attn\.conv1d\.weight")
_OF_STATE_SPACE = re.compile(r".+\.linear_attn\.(rates|D|norm\.weight)")
_SHARED_GATE = re.compile(r".+\.mlp\.shared_experts_gate\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_WEIGHT = re.compile(r"(\w+)\.(weight|bias)")


def hugging_face_name(name: str) -> str:
    """Hugging Face's name of the tensor that llama.cpp calls `name`."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _WHOLE.get(name, name)
    number, rest = layer.groups()
    weight = _WEIGHT.fullmatch(rest)
    if rest in _WITHOUT_KIND:
        return f"model.layers.{number}.{_WITHOUT_KIND[rest]}"
    if weight is None or weight[1] not in _OF_LAYER:
        return name
    return f"model.layers.{number}.{_OF_LAYER[weight[1]]}.{weight[2]}"


def llama_cpp_name(name: str) -> str:
    """llama.cpp's name of the tensor that Hugging Face calls `name`, for messages."""
    layer = _OUR_LAYER.fullmatch(name)
    if layer is None:
        return next((ours for ours, theirs in _WHOLE.items() if theirs == name), name)
    number, rest = layer.groups()
    if rest in _OURS:
        return f"blk.{number}.{_OURS[rest]}"
    part, _, kind = rest.rpartition(".")
    part = _OUR_EXPERT.sub(r"\1.\2", part)
    return f"blk.{number}.{_OURS[part]}.{kind}" if part in _OURS else name


def matrix_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor by Hugging Face's name, as a checkpoint has it: with the rows of all
    heads one below the other where the file has a matrix for each head, with the dimensions of 1
    that the file leaves out, and without those that it adds to a state space's vectors."""
    if len(shape) == 3 and _HEAD_BY_HEAD.fullmatch(name):
        return (shape[0] * shape[1], shape[2])
    if len(shape) == 2 and _CONVOLUTION.fullmatch(name):
        return (shape[0], 1, shape[1])
    if len(shape) == 2 and _OF_STATE_SPACE.fullmatch(name):
        return (shape[0] * shape[1],)
    if len(shape) == 1 and _SHARED_GATE.fullmatch(name):
        return (1, *shape)
    return shape
