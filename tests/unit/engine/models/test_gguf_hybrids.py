"""Hybrids from GGUF files as llama.cpp's converter writes them: transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.config import load_model_config
from engine.checkpoint.quantized_blocks import BlockMatrix
from engine.checkpoint.weights import load_block_weights
from protocol.errors import ModelLoadError
from tests.gguf_hybrids import (
    DELTA_FAMILIES,
    INTERVAL,
    Converted,
    write_delta,
)
from tests.hybrid_models import HYBRIDS
from tests.unit.engine.models.test_decoder import CLOSE, TABLE


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of these files are not for anybody's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tiny_of(make_tiny: Any, family: str, **options: Any) -> Any:
    architecture, usual = HYBRIDS[DELTA_FAMILIES[family]]
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
    folder = write_delta(tmp_path / "tiny.gguf", converted, name, ahead=int(name == "qwen35"))
    tokens = text(30)
    logits = paged_model(folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


def test_quantized_matrices_of_states_stay_as_they_are(make_tiny, tmp_path):
    """Although value heads are moved."""
    tiny = tiny_of(make_tiny, "qwen35", hidden_size=64, linear_value_head_dim=16)
    converted = Converted(tiny.folder, "qwen35", True)
    folder = write_delta(tmp_path / "tiny.gguf", converted, "qwen35", "Q8_0")
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
    folder = write_delta(tmp_path / "tiny.gguf", converted, "qwen35moe")
    tokens = text(20)
    logits = paged_model(folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


def test_gate_and_up_of_all_experts_may_be_one_tensor(make_tiny, paged_model, text, tmp_path):
    """As llama.cpp's converter writes them with --fuse-gate-up-exps."""
    tiny = tiny_of(make_tiny, "qwen35moe")
    converted = Converted(tiny.folder, "qwen35moe", True)
    for name in [each for each in converted.tensors if "ffn_gate_exps" in each]:
        halves = [converted.tensors.pop(name.replace("gate", half)) for half in ("gate", "up")]
        both = name.replace("ffn_gate_exps", "ffn_gate_up_exps")
        converted.tensors[both] = torch.cat(halves, dim=1)
    folder = write_delta(tmp_path / "tiny.gguf", converted, "qwen35moe")
    tokens = text(20)
    logits = paged_model(folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


def test_what_a_file_lacks_is_named(make_tiny, tmp_path):
    tiny = tiny_of(make_tiny, "qwen35")
    converted = Converted(tiny.folder, "qwen35", True)
    del converted.tensors["blk.2.ssm_a"]
    folder = write_delta(tmp_path / "tiny.gguf", converted, "qwen35")
    with pytest.raises(
        ModelLoadError, match=r"tiny\.gguf: tensor 'blk\.2\.ssm_a' \[6\] is missing"
    ):
        load_block_weights(folder, load_model_config(folder), torch.float32)
    converted.config["linear_num_value_heads"] = 5
    with pytest.raises(ModelLoadError, match=r"other.gguf: 'qwen35\.ssm\.time_step_rank' must be"):
        write_delta(tmp_path / "other.gguf", converted, "qwen35")
