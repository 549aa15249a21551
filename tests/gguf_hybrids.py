"""GGUF files of hybrids for tests, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import quantize
from safetensors.torch import load_file

from bench.tools.gguf_conversion import finish
from checkpoint.model_source import resolve_model
from tests.gguf_files import (
    in_pairs,
    llama_cpp_name,
    with_stacks,
    write_metadata,
    write_vocabulary,
)

Tensors = dict[str, torch.Tensor]
INTERVAL: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,
    "mlp_only_layers": [],
}
"""Which layers have full attention, as a file of Qwen3-Next or Qwen3.5 can say it."""
DELTA_FAMILIES = {"qwen3next": "qwen3-next", "qwen35": "qwen3.5", "qwen35moe": "qwen3.5 moe"}
NEMOTRON_FAMILIES = {"nemotron_h": "nemotron-h", "nemotron_h_moe": "nemotron-h moe"}
"""llama.cpp's names of the models in `tests.hybrid_models`."""
_STATES = {
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_qkvz": "ssm_in",
    "in_proj_ba": "ssm_ba",
    "in_proj_b": "ssm_beta",
    "in_proj_a": "ssm_alpha",
    "out_proj": "ssm_out",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
}


class Converted:
    """A checkpoint's tensors in llama.cpp's form. `splits` the inputs of Qwen3-Next's states, as
    its converter does since December 2025."""

    def __init__(self, folder: Path, name: str, splits: bool) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._name = name
        self._splits = splits
        self._keys = self.config["linear_num_key_heads"]
        self._per_key = self.config["linear_num_value_heads"] // self._keys
        self._widths = (self.config["linear_key_head_dim"], self.config["linear_value_head_dim"])
        self.tensors: Tensors = {}
        for each, tensor in with_stacks(load_file(folder / "model.safetensors")).items():
            self._add(each, tensor)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = tensor + 1
        if "linear_attn" in name:
            self._add_state(f"blk.{name.split('.')[2]}", name.split("linear_attn.")[1], tensor)
        else:
            name = name.replace("post_attention_layernorm", "post_attention_norm")
            self.tensors[llama_cpp_name(name)] = tensor

    def _add_state(self, layer: str, name: str, tensor: torch.Tensor) -> None:
        kind = name.removesuffix(".weight")
        if kind == "conv1d":
            tensor = tensor.squeeze(1)
        if self._name != "qwen3next":
            tensor = self._by_turns(kind, tensor)
        if kind == "A_log":
            self.tensors[f"{layer}.ssm_a"] = -tensor.exp()
        elif kind == "dt_bias":
            self.tensors[f"{layer}.ssm_dt.bias"] = tensor
        elif kind == "in_proj_qkvz" and self._splits:
            of_key, of_value = self._widths[0], self._widths[1] * self._per_key
            by_head = tensor.unflatten(0, (self._keys, -1))
            parts = by_head.split([of_key, of_key, of_value, of_value], dim=1)
            *qkv, z = (part.flatten(0, 1) for part in parts)
            self.tensors[f"{layer}.attn_qkv.weight"] = torch.cat(qkv)
            self.tensors[f"{layer}.attn_gate.weight"] = z
        else:
            self.tensors[f"{layer}.{_STATES[kind]}.weight"] = tensor

    def _by_turns(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """With the first value head of each key head first, then the second ones."""

        def moved(x: torch.Tensor, width: int) -> torch.Tensor:
            return x.unflatten(0, (self._keys, self._per_key, width)).transpose(0, 1).flatten(0, 2)

        first_value = 2 * self._keys * self._widths[0]
        if kind in ("in_proj_qkv", "conv1d"):
            return torch.cat((tensor[:first_value], moved(tensor[first_value:], self._widths[1])))
        if kind == "in_proj_z":
            return moved(tensor, self._widths[1])
        if kind == "out_proj":
            return moved(tensor.t(), self._widths[1]).t()
        return tensor if kind == "norm" else moved(tensor, 1)


def write_delta(
    file: Path, converted: Converted, name: str, kind: str = "F32", ahead: int = 0
) -> Path:
    """The folder that stands for a file whose matrices of states are stored as `kind`."""
    config = dict(converted.config)
    if name != "qwen35":
        config["num_local_experts"] = config["num_experts"]
    config["num_hidden_layers"] += ahead
    is_left_out = name == "qwen35moe"
    config.setdefault("intermediate_size", 72)
    writer = gguf.GGUFWriter(file, name)
    write_metadata(writer, name, config, has_inner=not is_left_out)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    writer.add_ssm_inner_size(inner)
    writer.add_full_attention_interval(INTERVAL["full_attention_interval"])
    part = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config["head_dim"] * part))
    if ahead:
        writer.add_nextn_predict_layers(ahead)
        writer.add_tensor("blk.4.nextn.enorm.weight", torch.ones(48).numpy())
    of_kind = ("attn_qkv.weight", "attn_gate.weight", "ssm_out.weight")
    return _written(file, writer, converted.tensors, kind, of_kind)


def write_nemotron(file: Path, folder: Path, name: str, kind: str = "F32") -> Path:
    """The folder that stands for a file of the Nemotron-H in `folder`, whose experts and inputs of
    states are stored as `kind`."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    kinds = config["layers_block_type"]
    writer = gguf.GGUFWriter(file, name)
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(len(kinds))
    writer.add_feed_forward_length(
        [config["intermediate_size"] if kind in ("mlp", "moe") else 0 for kind in kinds]
    )
    writer.add_head_count(config["num_attention_heads"])
    num_kv_heads = config["num_key_value_heads"]
    writer.add_head_count_kv([num_kv_heads * (each == "full_attention") for each in kinds])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    if name == "nemotron_h_moe":
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        size = config["moe_shared_expert_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(size)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    write_vocabulary(writer, config["vocab_size"])
    of_kind = ("ssm_in.weight", "_exps.weight", "_shexp.weight")
    return _written(file, writer, nemotron_tensors(folder, config), kind, of_kind)


_MIXER = {
    "in_proj.weight": "ssm_in.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
    "q_proj.weight": "attn_q.weight",
    "k_proj.weight": "attn_k.weight",
    "v_proj.weight": "attn_v.weight",
    "o_proj.weight": "attn_output.weight",
    "up_proj.weight": "ffn_up.weight",
    "down_proj.weight": "ffn_down.weight",
    "gate.weight": "ffn_gate_inp.weight",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}


def nemotron_tensors(folder: Path, config: dict[str, Any]) -> Tensors:
    """The tensors of a Nemotron-H by llama.cpp's names and in its shapes: A and D are columns, a
    norm has a row for each group, and rows of q and k are in pairs."""
    whole = {
        "backbone.embeddings.weight": "token_embd.weight",
        "backbone.norm_f.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    heads = {
        "q_proj.weight": config["num_attention_heads"],
        "k_proj.weight": config["num_key_value_heads"],
    }
    found: Tensors = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name in whole:
            found[whole[name]] = tensor
            continue
        _, _, number, part = name.split(".", 3)
        layer, part = f"blk.{number}", part.removeprefix("mixer.")
        if name.endswith(f"{number}.norm.weight"):
            found[f"{layer}.attn_norm.weight"] = tensor
        elif part.startswith("experts."):
            kind = part.split(".")[2].removesuffix("_proj")
            experts.setdefault(f"{layer}.ffn_{kind}_exps.weight", []).append(tensor)
        elif part in heads:
            rows = in_pairs(tensor.numpy(), heads[part])
            found[f"{layer}.{_MIXER[part]}"] = torch.from_numpy(rows)
        else:
            found[f"{layer}.{_MIXER[part]}"] = _state_form(part, tensor, config["n_groups"])
    return found | {name: torch.stack(each) for name, each in experts.items()}


def _state_form(part: str, tensor: torch.Tensor, num_groups: int) -> torch.Tensor:
    if part == "A_log":
        return -tensor.exp().unsqueeze(1)
    if part == "D":
        return tensor.unsqueeze(1)
    if part == "norm.weight":
        return tensor.view(num_groups, -1)
    return tensor.squeeze(1) if part == "conv1d.weight" else tensor


def _written(
    file: Path, writer: gguf.GGUFWriter, tensors: Tensors, kind: str, of_kind: tuple[str, ...]
) -> Path:
    """The folder that stands for the file with these tensors; those whose names end in one of
    `of_kind` are stored as `kind`."""
    for name, tensor in tensors.items():
        type_ = gguf.GGMLQuantizationType[kind if name.endswith(of_kind) else "F32"]
        writer.add_tensor(name, quantize(tensor.contiguous().numpy(), type_), raw_dtype=type_)
    finish(writer)
    return resolve_model(file)
