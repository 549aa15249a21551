"""The architectures that Baton loads, and how each differs from the others; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """How an architecture differs from the others; the defaults follow transformers."""

    configurable_biases: bool  # honours attention_bias
    configurable_mlp_bias: bool = False  # honours mlp_bias
    qkv_bias: bool = False  # always has biases on q, k, v (and none on o)
    qk_norm: bool = False
    multi_head_default: bool = False  # without num_key_value_heads, one KV head per query head
    head_dim_required: bool = False
    windows: str = "none"  # "none", "uniform" (Mistral) or "layers" (Qwen)


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        configurable_biases=True, configurable_mlp_bias=True, multi_head_default=True
    ),
    "MistralForCausalLM": Architecture(configurable_biases=False, windows="uniform"),
    "Qwen2ForCausalLM": Architecture(configurable_biases=False, qkv_bias=True, windows="layers"),
    "Qwen3ForCausalLM": Architecture(
        configurable_biases=True, qk_norm=True, head_dim_required=True, windows="layers"
    ),
}
"""Architectures by their name in a checkpoint's `architectures`."""
