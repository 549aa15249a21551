"""Gemma, gpt-oss and Qwen2-MoE from GGUF files of llama.cpp's converter: transformers' logits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from checkpoint.gguf.configuration import end_ids
from checkpoint.gguf.header import read_header
from checkpoint.json_keys import JsonKeys
from checkpoint.model_source import resolve_model
from engine.checkpoint.config import load_model_config
from engine.checkpoint.quantized_blocks import BlockMatrix
from engine.checkpoint.weights import load_block_weights
from tests.effort import some
from tests.gguf_families import FAMILIES as ALL_FAMILIES
from tests.gguf_families import write, write_family
from tests.unit.engine.models.test_decoder import CLOSE, TABLE


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of these files are not for anybody's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "sliding_window_pattern": 6},
    ),
    "gpt-oss": ("GptOssForCausalLM", {}),
    "qwen2moe": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
}


@pytest.mark.parametrize("family", some(ALL_FAMILIES, 6))
def test_files_of_tests_have_the_names_that_llama_cpp_gives(tmp_path, family):
    """By the lists in its Python package."""
    header = read_header(write_family(tmp_path, family, "Q8_0"))
    name = header.metadata["general.architecture"]
    architecture = next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    names = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[architecture]}
    for tensor in header.tensors:
        stem = tensor.name.removesuffix(".weight").removesuffix(".bias")
        assert re.sub(r"^blk\.\d+", "blk.{bid}", stem) in names, tensor.name
    groups = [each for each in vars(gguf.Keys).values() if isinstance(each, type)]
    keys = [key for group in groups for key in vars(group).values() if isinstance(key, str)]
    assert header.metadata.keys() <= {key.replace("{arch}", name) for key in keys}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(make_tiny, paged_model, text, tmp_path, name):
    architecture, options = FAMILIES[name]
    tiny = make_tiny(architecture, tie_word_embeddings=name.startswith("gemma"), **options)
    tiny.reference.save_pretrained(tiny.folder, save_original_format=False)
    write(tmp_path / "tiny.gguf", tiny.folder, name)
    folder = resolve_model(tmp_path / "tiny.gguf")
    tokens = text(30)
    logits = paged_model(folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


def test_the_models_of_27_b_divide_scores_otherwise(make_tiny, tmp_path):
    """By the root of hidden size per head; the file does not say it."""
    tiny = make_tiny("Gemma3ForCausalLM", num_hidden_layers=62)
    write(tmp_path / "tiny.gguf", tiny.folder, "gemma3")
    config = load_model_config(resolve_model(tmp_path / "tiny.gguf"))
    assert config.scoring.scale == pytest.approx(8**-0.5)


def test_experts_in_mxfp4_have_the_values_of_the_gguf_package(make_tiny, tmp_path):
    tiny = make_tiny("GptOssForCausalLM", hidden_size=64, intermediate_size=64)
    values = write(tmp_path / "tiny.gguf", tiny.folder, "gpt-oss", "MXFP4")
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
