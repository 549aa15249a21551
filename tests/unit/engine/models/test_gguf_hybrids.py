"""Hybrids from GGUF files as llama.cpp's converter writes them: transformers' logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file

from checkpoint.model_source import resolve_model
from engine.checkpoint.config import load_model_config
from engine.checkpoint.quantized_blocks import BlockMatrix
from engine.checkpoint.weights import load_block_weights
from protocol.errors import ModelLoadError
from tests.gguf_files import llama_cpp_name, with_stacks, write_metadata
from tests.hybrid_models import HYBRIDS
from tests.unit.engine.models.test_decoder import CLOSE, TABLE

Tensors = dict[str, torch.Tensor]
INTERVAL = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,
    "mlp_only_layers": [],
}
"""Which layers have full attention, as a file can say it."""
FAMILIES = {"qwen3next": "qwen3-next", "qwen35": "qwen3.5", "qwen35moe": "qwen3.5 moe"}
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


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of these files are not for anybody's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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


def write(file: Path, converted: Converted, name: str, kind: str = "F32", ahead: int = 0) -> Path:
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
    for each, tensor in converted.tensors.items():
        is_kind = each.endswith(("attn_qkv.weight", "attn_gate.weight", "ssm_out.weight"))
        type_ = gguf.GGMLQuantizationType[kind if is_kind else "F32"]
        writer.add_tensor(each, quantize(tensor.contiguous().numpy(), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return resolve_model(file)


def tiny_of(make_tiny: Any, family: str, **options: Any) -> Any:
    architecture, usual = HYBRIDS[FAMILIES[family]]
    tiny = make_tiny(architecture, **usual | INTERVAL | options)
    tiny.reference.save_pretrained(tiny.folder, save_original_format=False)
    return tiny


@pytest.mark.parametrize(
    ("name", "splits"),
    [("qwen3next", True), ("qwen3next", False), ("qwen35", True), ("qwen35moe", True)],
)
def test_logits_equal_transformers(make_tiny, paged_model, text, tmp_path, name, splits):
    tiny = tiny_of(make_tiny, name)
    converted = Converted(tiny.folder, name, splits)
    folder = write(tmp_path / "tiny.gguf", converted, name, ahead=int(name == "qwen35"))
    tokens = text(30)
    logits = paged_model(folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


def test_quantized_matrices_of_states_stay_as_they_are(make_tiny, tmp_path):
    """Although value heads are moved."""
    tiny = tiny_of(make_tiny, "qwen35", hidden_size=64, linear_value_head_dim=16)
    converted = Converted(tiny.folder, "qwen35", True)
    folder = write(tmp_path / "tiny.gguf", converted, "qwen35", "Q8_0")
    config = load_model_config(folder)
    attention = load_block_weights(folder, config, torch.bfloat16).layers[0].attention
    assert isinstance(attention.matrices["o"], BlockMatrix)
    stored = torch.cat([converted.tensors[f"blk.0.{n}.weight"] for n in ("attn_qkv", "attn_gate")])
    qkvz = attention.matrices["qkvz"]
    values = torch.cat([part.dequantized() for part in qkvz.parts])
    torch.testing.assert_close(values, stored, rtol=0.0, atol=0.01)


def test_a_gate_of_one_dimension_is_the_shared_expert_s(make_tiny, paged_model, text, tmp_path):
    tiny = tiny_of(make_tiny, "qwen35moe")
    converted = Converted(tiny.folder, "qwen35moe", True)
    for name in converted.tensors:
        if "gate_inp_shexp" in name:
            converted.tensors[name] = converted.tensors[name].squeeze(0)
    folder = write(tmp_path / "tiny.gguf", converted, "qwen35moe")
    tokens = text(20)
    logits = paged_model(folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


def test_what_a_file_lacks_is_named(make_tiny, tmp_path):
    tiny = tiny_of(make_tiny, "qwen35")
    converted = Converted(tiny.folder, "qwen35", True)
    del converted.tensors["blk.2.ssm_a"]
    folder = write(tmp_path / "tiny.gguf", converted, "qwen35")
    with pytest.raises(
        ModelLoadError, match=r"tiny\.gguf: tensor 'blk\.2\.ssm_a' \[6\] is missing"
    ):
        load_block_weights(folder, load_model_config(folder), torch.float32)
    converted.config["linear_num_value_heads"] = 5
    with pytest.raises(ModelLoadError, match=r"other.gguf: 'qwen35\.ssm\.time_step_rank' must be"):
        write(tmp_path / "other.gguf", converted, "qwen35")
