"""Checkpoints that are damaged, mislabelled or of an unknown format: every command that loads one
ends with one line that names the file and the tensor or key, and leaves nothing running."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.gguf.header import BLOCK_TYPES
from engine.native.kernel_cache import cache_folder
from process.store.embedded_valkey import EmbeddedValkey
from tests.gguf_files import write_gguf
from tests.integration.refusals import WORKER, refusal_of
from tests.paths import DEMO_MODEL
from tests.published_formats import FORMATS, change_config, change_tensors, compressed, publish

Damage = Callable[[Path], Any]
Q = "model.layers.1.self_attn.q_proj"
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 24}
_INT4 = {"num_bits": 4, "type": "int", "group_size": 24}


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    return lambda folder: change_tensors(folder, change)


def config(**fields: Any) -> Damage:
    return lambda folder: change_config(folder, **fields)


def generation(**fields: Any) -> Damage:
    return lambda folder: (folder / "generation_config.json").write_text(json.dumps(fields))


def quantized(name: str, change: Callable[[dict[str, torch.Tensor]], Any] | None = None) -> Damage:
    """A checkpoint in one of the published formats, whose tensors are then changed."""

    def damage(folder: Path) -> None:
        publish(folder, FORMATS[name])
        if change is not None:
            change_tensors(folder, change)

    return damage


def both(*damages: Damage) -> Damage:
    def damage(folder: Path) -> None:
        for each in damages:
            each(folder)

    return damage


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda found: found.update({name: tensor})


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda found: found.pop(name)


def index(weight_map: dict[str, str]) -> Damage:
    """One file, and an index that names it for all tensors, with changes; "" for a tensor that it
    does not list."""

    def damage(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        save_file(found, folder / "a.safetensors")
        changed = dict.fromkeys(found, "a.safetensors") | weight_map
        kept = {name: file for name, file in changed.items() if file}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept}))

    return damage


def gguf_file(change: Callable[[bytearray], Any] | None = None, **changes: Any) -> Damage:
    """The model as a GGUF file alone; `change` changes its bytes, `changes` its configuration."""

    def damage(folder: Path) -> None:
        change_config(folder, **changes)
        write_gguf(folder / "m.gguf", folder, "qwen3")
        for file in folder.iterdir():
            if file.suffix != ".gguf":
                file.unlink()
        content = bytearray((folder / "m.gguf").read_bytes())
        if change is not None:
            change(content)
        (folder / "m.gguf").write_bytes(content)

    return damage


def renamed(old: str, new: str) -> Callable[[bytearray], None]:
    """Texts of equal length."""

    def change(content: bytearray) -> None:
        assert len(old) == len(new)
        place = content.index(old.encode())
        content[place : place + len(old)] = new.encode()

    return change


def of_type(name: str, number: int) -> Callable[[bytearray], None]:
    """The type's number follows the tensor's name, the number of its dimensions, and these."""

    def change(content: bytearray) -> None:
        assert number not in BLOCK_TYPES
        place = content.index(name.encode()) + len(name)
        dimensions = struct.unpack_from("<I", content, place)[0]
        struct.pack_into("<I", content, place + 4 + 8 * dimensions, number)

    return change


def cut(content: bytearray) -> None:
    del content[-1000:]


WRONG: dict[str, tuple[Damage, list[str]]] = {
    "tensor missing": (tensors(drop(f"{Q}.weight")), [f"{Q}.weight", "missing"]),
    "shape": (tensors(put(f"{Q}.weight", torch.zeros(192, 191))), [Q, "[192, 191]", "[192, 192]"]),
    "type": (tensors(put(f"{Q}.weight", torch.zeros(192, 192).long())), [Q, "I64"]),
    "quantization unknown": (
        config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ["config.json", "'quant_method'", "bitsandbytes"],
    ),
    "codes without a configuration": (
        both(quantized("fp8 per tensor"), config(quantization_config=None)),
        ["proj.weight", "F8_E4M3", "'quantization_config'"],
    ),
    "packed codes without a configuration": (
        both(quantized("nvfp4 of ModelOpt"), config(quantization_config=None)),
        ["proj.weight", "U8", "'quantization_config'"],
    ),
    "index names a file that is not there": (
        index({"lm_head.weight": "c.safetensors"}),
        ["index.json", "c.safetensors"],
    ),
    "index lacks a tensor": (
        index({f"{Q}.weight": ""}),
        ["index.json", f"{Q}.weight", "missing"],
    ),
    "scales missing": (
        quantized("fp8 in blocks", drop(f"{Q}.weight_scale_inv")),
        [f"{Q}.weight_scale_inv", "missing"],
    ),
    "scales of another shape": (
        quantized("fp8 in blocks", put(f"{Q}.weight_scale_inv", torch.ones(12, 11))),
        [f"{Q}.weight_scale_inv", "[12, 11]", "[12, 12]"],
    ),
    "rope unknown": (
        config(rope_scaling={"rope_type": "longrope", "factor": 4.0}),
        ["config.json: rope_scaling", "longrope"],
    ),
    "rope without a factor": (
        config(rope_scaling={"rope_type": "linear"}),
        ["config.json: rope_scaling", "'factor'"],
    ),
    "another family": (config(architectures=["LlamaForCausalLM"]), ["k_norm.weight", "Llama"]),
    "another family unknown": (config(architectures=["MambaForCausalLM"]), ["MambaForCausalLM"]),
    "fewer layers": (
        config(num_hidden_layers=2, layer_types=None),
        ["model.layers.2.", "'num_hidden_layers'"],
    ),
    "more layers": (config(num_hidden_layers=5, layer_types=None), ["model.layers.4.", "missing"]),
    "untied": (
        config(tie_word_embeddings=False),
        ["lm_head.weight", "missing", "'tie_word_embeddings'"],
    ),
    "gptq with other groups": (
        both(quantized("gptq"), config(quantization_config=_GPTQ | {"group_size": 100})),
        ["scales", "[8, ", "[2, "],
    ),
    "gptq of 3 bits": (
        config(quantization_config=_GPTQ | {"bits": 3}),
        ["config.json: quantization_config", "'bits'", "3"],
    ),
    "awq for gemv": (
        config(quantization_config={"quant_method": "awq", "version": "gemv"}),
        ["config.json: quantization_config", "'version'", "gemv"],
    ),
    "sparse": (
        config(
            quantization_config=compressed(
                "pack-quantized", _INT4, sparsity_config={"format": "sparse-24-bitmask"}
            )
        ),
        ["config.json", "sparsity_config", "sparse-24-bitmask"],
    ),
    "strategy unknown": (
        config(quantization_config=compressed("pack-quantized", _INT4 | {"strategy": "attn_head"})),
        ["config.json", "'strategy'", "attn_head"],
    ),
    "nvfp4 without its global scale": (
        quantized("nvfp4", drop(f"{Q}.weight_global_scale")),
        [f"{Q}.weight_global_scale", "missing"],
    ),
    "nvfp4 with a global scale of nan": (
        quantized("nvfp4", put(f"{Q}.weight_global_scale", torch.tensor([math.nan]))),
        [f"{Q}.weight_global_scale", "nan"],
    ),
    "end of text outside the vocabulary": (
        generation(eos_token_id=2048),
        ["config.json", "'eos_token_id'", "2048"],
    ),
    "gguf cut short": (gguf_file(cut), ["m.gguf", "tensor", "outside the file"]),
    "gguf without a tensor": (
        gguf_file(renamed("blk.1.attn_q.weight", "blk.1.attn_x.weight")),
        ["m.gguf", "blk.1.attn_q.weight", "missing"],
    ),
    "gguf of an unknown type": (
        gguf_file(of_type("blk.1.attn_q.weight", gguf.GGMLQuantizationType.IQ4_XS)),
        ["m.gguf", "blk.1.attn_q.weight", "IQ4_XS"],
    ),
    "gguf of another architecture": (
        gguf_file(renamed("qwen3", "rwkv7")),
        ["m.gguf", "rwkv7"],
    ),
    "gguf without a key": (
        gguf_file(renamed("qwen3.block_count", "qwen3.block_cxunt")),
        ["m.gguf", "qwen3.block_count", "missing"],
    ),
    "gguf with fewer layers": (
        gguf_file(num_hidden_layers=3),
        ["m.gguf", "blk.3.", "3 layers"],
    ),
    "gguf with other widths": (
        gguf_file(intermediate_size=500),
        ["m.gguf", "blk.0.ffn_", "[512, 192]", "[500, 192]"],
    ),
    "gguf with an unknown way of splitting text": (
        gguf_file(renamed("gpt-2", "gpt-x")),
        ["m.gguf", "'tokenizer.ggml.pre'", "gpt-x"],
    ),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for the folders of GGUF files, with the usual one's compiled kernels."""
    kernels = cache_folder()
    kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
    (tmp_path / "cache" / "baton").mkdir(mode=0o700, parents=True)
    (tmp_path / "cache" / "baton" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRONG)
def test_a_worker_refuses_it(tmp_path: Path, valkey: EmbeddedValkey, name: str) -> None:
    damage, words = WRONG[name]
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    damage(folder)
    line = refusal_of(folder, valkey.url, "decode", *WORKER)
    assert all(word in line for word in words), line


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fewer layers", "scales of another shape", "gguf cut short"])
def test_a_fleet_refuses_it(tmp_path: Path, name: str) -> None:
    damage, words = WRONG[name]
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    damage(folder)
    line = refusal_of(folder, "", "up", "--port=0", *WORKER)
    assert all(word in line for word in words), line
