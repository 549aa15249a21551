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
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hugging_face_name(name: str) -> str:
    """Hugging Face's name of the tensor that llama.cpp calls `name`."""
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _OF_LAYER:
        return _WHOLE.get(name, name)
    return f"model.layers.{match[1]}.{_OF_LAYER[match[2]]}.{match[3]}"
