"""A quantized checkpoint: the same tensors, those of products in blocks, for any kind of layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.model_source import resolve_model
from engine.checkpoint.config import load_model_config
from engine.checkpoint.model_weights import EMBED, LM_HEAD
from engine.checkpoint.quantized_blocks import BlockRows
from engine.checkpoint.stored_tensors import FileTensors
from engine.checkpoint.weights import load_block_weights
from engine.cpu.backend import CpuBackend
from engine.models.decoder import DecoderModel
from engine.rounding.quantized_checkpoint import RecordedLayer, plain_config, write_quantized
from protocol.errors import ModelLoadError
from tests.gguf_files import write_gguf
from tests.hybrid_models import HYBRIDS
from tests.latent_models import LATENT_MODELS
from worker.weights.choice import can_send

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "kv_lora_rank": 32}
NEMOTRON = HYBRIDS["nemotron-h moe"][1] | {"hidden_size": 64, "moe_intermediate_size": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "tied": ("LlamaForCausalLM", SIZES | {"tie_word_embeddings": True}),
    "biases": ("Qwen2ForCausalLM", SIZES),
    "experts": ("Qwen3MoeForCausalLM", SIZES | EXPERTS),
    "windows": ("Gemma3ForCausalLM", SIZES),
    "latents": ("DeepseekV3ForCausalLM", LATENT_MODELS["deepseek v3"][1] | WIDE),
    "hybrid": ("Qwen3NextForCausalLM", HYBRIDS["qwen3-next"][1] | {"hidden_size": 64}),
    "mamba": ("NemotronHForCausalLM", NEMOTRON),
}
WINDOWS = [list(range(start, start + 40)) for start in (0, 17, 50)]


def quantized(folder: Path, target: Path, kernels: Any) -> FileTensors:
    target.mkdir()
    write_quantized(folder, WINDOWS, target, kernels)
    return FileTensors(target)


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The distance, as a share of what is expected."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_one_by_one_compute_what_the_model_does(
    kernels, make_tiny, paged_model, family: str
) -> None:
    architecture, fields = FAMILIES[family]
    folder = make_tiny(architecture, dtype=torch.bfloat16, **fields).folder
    config, states = load_model_config(folder), []
    for stage in range(config.num_layers):
        layer = RecordedLayer(folder, config, stage, kernels)
        states = layer.read(list(map(torch.tensor, WINDOWS)), states)
    for window, state in zip(WINDOWS, states, strict=True):
        whole = paged_model(folder, kernels=kernels)
        expected = whole.step([(window, 0, range(10))])
        assert far(whole.model.logits(state), expected) < 0.15


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_in_blocks_and_other_tensors_as_they_were(
    kernels, make_tiny, paged_model, tmp_path, family: str
) -> None:
    architecture, fields = FAMILIES[family]
    folder = make_tiny(architecture, dtype=torch.bfloat16, **fields).folder
    before, after = FileTensors(folder), quantized(folder, tmp_path / "quantized", kernels)
    assert after.entries.keys() == before.entries.keys() | {LM_HEAD}
    in_blocks = {name for name, each in after.entries.items() if each.dtype in ("Q4_1", "Q5_1")}
    for name, entry in after.entries.items():
        stored = before.read(EMBED if name not in before.entries else name)
        if name not in in_blocks:
            assert entry.dtype == before.entries[name].dtype, name
            assert torch.equal(after.read(name), stored), name
        else:
            found = BlockRows(after.read(name), entry.dtype).dequantized()
            assert far(found, stored) < 0.25, name
    assert after.entries[LM_HEAD].dtype == "Q5_1"
    count = {name: each.shape[0] * each.shape[-1] for name, each in after.entries.items()}
    whole = sum(map(count.get, count)) - count[EMBED]
    assert sum(map(count.get, in_blocks)) > 0.5 * whole
    expected = paged_model(folder, kernels=kernels).step([(WINDOWS[0], 0, range(10))])
    config = load_model_config(tmp_path / "quantized")
    model = paged_model(folder, kernels=kernels)
    weights = load_block_weights(tmp_path / "quantized", config, torch.bfloat16)
    model.model = DecoderModel(config, weights, CpuBackend(config, "bfloat16", kernels))
    assert far(model.step([(WINDOWS[0], 0, range(10))]), expected) < 0.8


def test_what_cannot_be_rounded_is_one_line(kernels, make_tiny, tmp_path) -> None:
    tiny = make_tiny(dtype=torch.bfloat16, **SIZES)
    quantized(tiny.folder, tmp_path / "quantized", kernels)
    assert can_send(tiny.folder)
    assert not can_send(tmp_path / "quantized"), "blocks are read from files only"
    with pytest.raises(ModelLoadError, match="quantized: the weights are quantized already"):
        plain_config(tmp_path / "quantized")
    write_gguf(tmp_path / "model.gguf", tiny.folder, "llama")
    with pytest.raises(ModelLoadError, match=r"model\.gguf: name a checkpoint in safetensors"):
        plain_config(resolve_model(tmp_path / "model.gguf"))
    gpt_oss = make_tiny("GptOssForCausalLM", dtype=torch.bfloat16).folder
    with pytest.raises(ModelLoadError, match="experts of GptOssForCausalLM are not rounded"):
        plain_config(gpt_oss)
    bad = load_file(tiny.folder / "model.safetensors")
    bad["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(bad, tiny.folder / "model.safetensors")
    (tmp_path / "bad").mkdir()
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.gate_proj\.weight'.* not finite"):
        write_quantized(tiny.folder, WINDOWS, tmp_path / "bad", kernels)


def test_small_files_come_along(kernels, make_tiny, tmp_path) -> None:
    folder = make_tiny(dtype=torch.bfloat16, **SIZES, tie_word_embeddings=True).folder
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("notes.bin", "tiktoken.model", "LICENSE"):
        (folder / name).write_bytes(b"0")
    quantized(folder, tmp_path / "quantized", kernels)
    target = tmp_path / "quantized"
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (target / "notes.bin").exists()
    assert (target / "tiktoken.model").read_bytes() == (target / "LICENSE").read_bytes() == b"0"
    before, after = (json.loads((each / "config.json").read_text()) for each in (folder, target))
    assert after == before | {"tie_word_embeddings": False, "dtype": "bfloat16"}
