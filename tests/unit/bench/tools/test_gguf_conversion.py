"""The GGUF files that the benchmark writes of its checkpoints: Baton loads the same from both."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from bench.tools.checkpoints import SHAPES, random_weights
from bench.tools.gguf_conversion import has_gguf, rope_theta, write_gguf
from checkpoint.gguf.folder import gguf_folder
from engine.checkpoint.config import load_model_config
from engine.checkpoint.weights import load_weights
from protocol.errors import BatonError

_SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
}


def _checkpoint(folder: Path, shape: str) -> dict[str, Any]:
    config = SHAPES[shape] | _SMALL
    if "num_experts" in config:
        config |= {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config), folder / "model.safetensors")
    return config


def _tensors(weights: object, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in the weights of a model, with their places."""
    if isinstance(weights, torch.Tensor):
        yield place, weights
    elif isinstance(weights, list | tuple):
        for index, each in enumerate(weights):
            yield from _tensors(each, f"{place}.{index}")
    elif isinstance(weights, Mapping):
        for name, each in weights.items():
            yield from _tensors(each, f"{place}.{name}")
    elif dataclasses.is_dataclass(weights):
        for field in dataclasses.fields(weights):
            yield from _tensors(getattr(weights, field.name), f"{place}.{field.name}")


@pytest.mark.parametrize("shape", ["M1", "M2", "M4"])
def test_a_converted_checkpoint_has_the_same_configuration_and_weights(tmp_path, shape):
    source = tmp_path / "source"
    _checkpoint(source, shape)
    file = tmp_path / "model.gguf"
    write_gguf(source, file)
    made = gguf_folder(file, tmp_path)
    assert has_gguf(made)
    assert not has_gguf(source)
    ours, theirs = load_model_config(source), load_model_config(made)
    assert theirs.layer_kinds == ours.layer_kinds
    assert theirs.experts == ours.experts
    expected = load_weights(source, ours, "cpu", torch.bfloat16)
    found = load_weights(made, theirs, "cpu", torch.bfloat16)
    compared = set()
    for (place, ours_there), (_, theirs_there) in zip(
        _tensors(expected), _tensors(found), strict=True
    ):
        assert torch.equal(theirs_there.to(ours_there.dtype), ours_there), place
        compared.add(place)
    assert ".layers.1.attention.matrices.qkv" in compared


def test_matrices_take_the_format_but_not_norms_and_routers(tmp_path):
    source = tmp_path / "source"
    _checkpoint(source, "M4")
    file = tmp_path / "model.gguf"
    write_gguf(source, file, "Q8_0")
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(file).tensors}
    plain = gguf.GGMLQuantizationType.F32
    for name, kind in kinds.items():
        is_plain = "norm" in name or "ffn_gate_inp" in name
        assert kind == (plain if is_plain else gguf.GGMLQuantizationType.Q8_0), name
    assert "blk.1.ffn_down_exps.weight" in kinds


def test_a_file_that_is_there_is_kept(tmp_path):
    source = tmp_path / "source"
    _checkpoint(source, "M1")
    file = tmp_path / "model.gguf"
    file.write_text("kept")
    write_gguf(source, file)
    assert file.read_text() == "kept"


def test_other_families_are_refused_by_name(tmp_path):
    source = tmp_path / "source"
    config = _checkpoint(source, "M1") | {"architectures": ["OtherForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(BatonError, match="OtherForCausalLM"):
        write_gguf(source, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model.norm.weight": torch.ones(64)},
            "norm.weight is in F32; GGUF is made of BF16",
        ),
        (
            {"model.layers.1.self_attn.q_norm.bias": torch.ones(64, dtype=torch.bfloat16)},
            r"model.layers.1.self_attn.q_norm.bias has no place",
        ),
        (None, r"model.safetensors is missing; GGUF is made of one file only"),
    ],
)
def test_checkpoints_that_are_not_converted_are_refused_in_one_line(tmp_path, changed, message):
    source = tmp_path / "source"
    config = _checkpoint(source, "M1")
    weights = source / "model.safetensors"
    if changed is None:
        weights.rename(source / "model-00001-of-00002.safetensors")
    else:
        save_file(random_weights(config) | changed, weights)
    with pytest.raises(BatonError, match=message) as error:
        write_gguf(source, tmp_path / "model.gguf")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "model.gguf").exists()


def test_what_a_config_may_leave_out_is_derived(tmp_path):
    source = tmp_path / "source"
    config = _checkpoint(source, "M1")
    config |= {"hidden_size": 128, "tie_word_embeddings": False}
    save_file(random_weights(config), source / "model.safetensors")
    for key in ("head_dim", "tie_word_embeddings"):
        del config[key]
    (source / "config.json").write_text(json.dumps(config))
    write_gguf(source, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["llama.attention.key_length"].contents() == 32
    assert "output.weight" in {tensor.name for tensor in reader.tensors}


def test_both_forms_of_the_rope_are_read():
    assert rope_theta({"rope_theta": 5e5}) == 5e5
    assert rope_theta({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}) == 1e6
    assert rope_theta({}) == 1e4
