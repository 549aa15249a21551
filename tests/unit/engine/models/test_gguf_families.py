"""Gemma, gpt-oss and Qwen2-MoE from GGUF files of llama.cpp's converter: transformers' logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from bench.tools.gguf_conversion import finish
from checkpoint.gguf.configuration import end_ids
from checkpoint.json_keys import JsonKeys
from checkpoint.model_source import resolve_model
from engine.checkpoint.config import load_model_config
from engine.checkpoint.quantized_blocks import BlockMatrix
from engine.checkpoint.weights import load_block_weights
from tests.gguf_files import llama_cpp_name, with_stacks, write_metadata
from tests.unit.engine.models.test_decoder import CLOSE, TABLE

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of these files are not for anybody's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
    file: Path, folder: Path, name: str, change: Callable[[Tensors], Tensors], kind: str
) -> Tensors:
    """The values that the file's tensors have, whose experts are stored as `kind`."""
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
    for each, tensor in change(load_file(folder / "model.safetensors")).items():
        data, type_ = tensor.float().numpy(), gguf.GGMLQuantizationType.F32
        if each.endswith("exps.weight"):
            type_ = gguf.GGMLQuantizationType[kind]
        stored = quantize(data, type_)
        values[each] = torch.from_numpy(dequantize(stored, type_)).view(tensor.shape)
        writer.add_tensor(each, stored, raw_dtype=type_)
    finish(writer)
    return values


FAMILIES: dict[str, tuple[str, Callable[[Tensors], Tensors], dict[str, Any]]] = {
    "gemma2": ("Gemma2ForCausalLM", of_gemma, {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3ForCausalLM",
        of_gemma,
        {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "sliding_window_pattern": 6},
    ),
    "gpt-oss": ("GptOssForCausalLM", of_gpt_oss, {}),
    "qwen2moe": (
        "Qwen2MoeForCausalLM",
        of_qwen2_moe,
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(make_tiny, paged_model, text, tmp_path, name):
    architecture, change, options = FAMILIES[name]
    tiny = make_tiny(architecture, tie_word_embeddings=change is of_gemma, **options)
    tiny.reference.save_pretrained(tiny.folder, save_original_format=False)
    write(tmp_path / "tiny.gguf", tiny.folder, name, change, "F32")
    folder = resolve_model(tmp_path / "tiny.gguf")
    tokens = text(30)
    logits = paged_model(folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


def test_the_models_of_27_b_divide_scores_otherwise(make_tiny, tmp_path):
    """By the root of hidden size per head; the file does not say it."""
    tiny = make_tiny("Gemma3ForCausalLM", num_hidden_layers=62)
    write(tmp_path / "tiny.gguf", tiny.folder, "gemma3", of_gemma, "F32")
    config = load_model_config(resolve_model(tmp_path / "tiny.gguf"))
    assert config.scoring.scale == pytest.approx(8**-0.5)


def test_experts_in_mxfp4_have_the_values_of_the_gguf_package(make_tiny, tmp_path):
    tiny = make_tiny("GptOssForCausalLM", hidden_size=64, intermediate_size=64)
    values = write(tmp_path / "tiny.gguf", tiny.folder, "gpt-oss", of_gpt_oss, "MXFP4")
    folder = resolve_model(tmp_path / "tiny.gguf")
    config = load_model_config(folder)
    for index, layer in enumerate(load_block_weights(folder, config, torch.bfloat16).layers):
        for expert in range(6):
            gate, up, down = (
                values[f"blk.{index}.ffn_{part}_exps.weight"][expert]
                for part in ("gate", "up", "down")
            )
            gate_up = layer.feed_forward.matrices[f"gate_up.{expert}"]
            assert isinstance(gate_up, BlockMatrix)
            assert torch.equal(gate_up.dequantized(), torch.cat((gate, up)))
            assert torch.equal(layer.feed_forward.matrices[f"down.{expert}"].dequantized(), down)


def test_an_answer_of_gpt_oss_ends_with_its_last_message(tmp_path):
    """`<|end|>` ends one of several messages."""

    tokens = ["<|return|>", "<|end|>", "<|call|>", "<|im_end|>", "a"]
    keys = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 1],
        "tokenizer.ggml.eos_token_id": 0,
    }
    assert end_ids(JsonKeys(keys, "file")) == [0, 2]
    keys["tokenizer.ggml.tokens"] = ["<|return|>", "<|end|>", "x", "<|im_end|>", "a"]
    assert end_ids(JsonKeys(keys, "file")) == [0, 1, 3]
