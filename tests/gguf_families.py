"""GGUF files of all families for tests, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from bench.tools.gguf_conversion import finish
from tests.gguf_files import llama_cpp_name, with_stacks, write_gguf, write_metadata
from tests.gguf_hybrids import (
    DELTA_FAMILIES,
    INTERVAL,
    NEMOTRON_FAMILIES,
    Converted,
    write_delta,
    write_nemotron,
)
from tests.hybrid_models import HYBRIDS
from tests.latent_models import V2, V3

Tensors = dict[str, torch.Tensor]


def of_gemma(tensors: Tensors) -> Tensors:
    """Norms' weights are whole there."""
    found = {}
    for name, tensor in tensors.items():
        theirs = (
            name.replace("post_attention_layernorm", "post_attention_norm")
            .replace("pre_feedforward_layernorm", "post_attention_layernorm")
            .replace("post_feedforward_layernorm", "post_ffw_norm")
        )
        found[llama_cpp_name(theirs)] = tensor + 1 if "norm" in name else tensor
    return found


def of_gpt_oss(tensors: Tensors) -> Tensors:
    """Gate and up are apart there, and matrices have their outputs first."""
    found = {}
    for name, tensor in tensors.items():
        layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        kind = "bias" if name.endswith("bias") else "weight"
        if name.endswith(("gate_up_proj", "gate_up_proj_bias")):
            for half, part in enumerate(("gate", "up")):
                each = tensor[..., half::2]
                each = each if kind == "bias" else each.transpose(1, 2)
                found[f"{layer}.ffn_{part}_exps.{kind}"] = each.contiguous()
        elif name.endswith(("experts.down_proj", "experts.down_proj_bias")):
            each = tensor if kind == "bias" else tensor.transpose(1, 2)
            found[f"{layer}.ffn_down_exps.{kind}"] = each.contiguous()
        elif "mlp.router" in name:
            found[f"{layer}.ffn_gate_inp.{kind}"] = tensor
        elif name.endswith("sinks"):
            found[f"{layer}.attn_sinks.weight"] = tensor
        elif "post_attention_layernorm" in name:
            found[f"{layer}.post_attention_norm.weight"] = tensor
        else:
            found[llama_cpp_name(name)] = tensor
    return found


def of_qwen2_moe(tensors: Tensors) -> Tensors:
    return {llama_cpp_name(name): tensor for name, tensor in with_stacks(tensors).items()}


def add_keys(writer: gguf.GGUFWriter, name: str, config: dict[str, Any]) -> None:
    if name == "qwen2moe":
        return
    writer.add_sliding_window(config["sliding_window"])
    if name == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
        writer.add_float32("gemma3.rope.freq_base_swa", 100.0)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if name == "gpt-oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)


def write(
    file: Path,
    folder: Path,
    name: str,
    kind: str = "F32",
    of_kind: tuple[str, ...] = ("exps.weight",),
) -> Tensors:
    """Write the checkpoint in `folder` as llama.cpp's architecture `name`. Tensors whose names end
    in one of `of_kind` are stored as `kind`. Returns the values that all tensors then have."""
    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_parameters"]
    config["rope_parameters"] = rope.get("full_attention", rope)
    config.setdefault("moe_intermediate_size", config["intermediate_size"])
    if name == "qwen2moe":
        config["num_local_experts"] = config["num_experts"]
    writer = gguf.GGUFWriter(file, name)
    write_metadata(writer, name, config)
    add_keys(writer, name, config)
    values = {}
    for each, tensor in CHANGES[name](load_file(folder / "model.safetensors")).items():
        data, type_ = tensor.float().numpy(), gguf.GGMLQuantizationType.F32
        if each.endswith(of_kind):
            type_ = gguf.GGMLQuantizationType[kind]
        stored = quantize(data, type_)
        values[each] = torch.from_numpy(dequantize(stored, type_)).view(tensor.shape)
        writer.add_tensor(each, stored, raw_dtype=type_)
    finish(writer)
    return values


CHANGES: dict[str, Callable[[Tensors], Tensors]] = {
    "gemma2": of_gemma,
    "gemma3": of_gemma,
    "gpt-oss": of_gpt_oss,
    "qwen2moe": of_qwen2_moe,
}
"""From a checkpoint's tensors to those of a file, by llama.cpp's name of the architecture."""
MATRICES = tuple(
    f"{name}.weight"
    for name in (
        *("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
        *("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    )
)
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""Rows of matrices are whole blocks of Q8_0."""
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 32}
_WINDOW = {"sliding_window": 40}
_STATES = INTERVAL | {"linear_value_head_dim": 32}
_MAMBA = {"mamba_head_dim": 32, "n_groups": 2}
_LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen35": ("qwen35", "qwen3_5_text", HYBRIDS["qwen3.5"][1] | _STATES),
    "qwen3next": ("qwen3next", "qwen3_next", HYBRIDS["qwen3-next"][1] | _STATES | _SHARED),
    "qwen35moe": ("qwen35moe", "qwen3_5_moe_text", HYBRIDS["qwen3.5 moe"][1] | _STATES | _SHARED),
    "nemotron_h": ("nemotron_h", "nemotron_h", HYBRIDS["nemotron-h"][1] | _MAMBA),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        "nemotron_h",
        HYBRIDS["nemotron-h moe"][1]
        | _MAMBA
        | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
    ),
    "gemma2": ("gemma2", "gemma2", _WINDOW | {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        _WINDOW | {"query_pre_attn_scalar": 16, "rope_parameters": _ROPES, "num_hidden_layers": 6},
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        _WINDOW | {"num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": _YARN},
    ),
    "qwen2moe": ("qwen2moe", "qwen2_moe", _SHARED),
    "qwen3moe": ("qwen3moe", "qwen3_moe", _EXPERTS | {"norm_topk_prob": True}),
    "mixtral": ("llama", "mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "deepseek v2": ("deepseek2", "deepseek_v2", V2 | _LATENT),
    "deepseek v3": ("deepseek2", "deepseek_v3", V3 | _LATENT),
    "llama": ("llama", "llama", {}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {}),
}
"""llama.cpp's names of the architectures, transformers' types of the models, and their options."""


def write_family(parent: Path, family: str, kind: str) -> Path:
    """The GGUF file of a random model of a family, whose matrices are stored as `kind`."""
    name, model_type, options = FAMILIES[family]
    usual = dict(SIZES)
    if name in NEMOTRON_FAMILIES:  # the list of their blocks says how many there are
        del usual["num_hidden_layers"]
    config = transformers.AutoConfig.for_model(model_type, **(usual | options))
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config)
    folder, file = parent / "model", parent / "model.gguf"
    model.save_pretrained(folder, save_original_format=name in NEMOTRON_FAMILIES)
    if name in NEMOTRON_FAMILIES:
        write_nemotron(file, folder, name, kind)
    elif name in DELTA_FAMILIES:
        write_delta(file, Converted(folder, name, splits=True), name, kind)
    elif name in CHANGES:
        write(file, folder, name, kind, MATRICES)
    else:
        write_gguf(file, folder, name, kind)
    return file
