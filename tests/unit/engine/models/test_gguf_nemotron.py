"""Nemotron-H from GGUF files as llama.cpp's converter writes them: transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from engine.checkpoint.config import load_model_config
from engine.checkpoint.quantized_blocks import BlockMatrix
from engine.checkpoint.weights import load_block_weights, load_weights
from engine.engine_config import EngineConfig
from engine.loader import load_engine
from protocol.errors import ModelLoadError
from scheduling.scheduler import SchedulerConfig
from tests import gguf_hybrids
from tests.gguf_hybrids import NEMOTRON_FAMILIES, write_nemotron
from tests.hybrid_models import HYBRIDS
from tests.unit.engine.models.test_decoder import CLOSE, TABLE
from tests.unit.engine.parallel.sharded_engine import generate


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of these files are not for anybody's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tiny_of(make_tiny: Any, name: str, **options: Any) -> Any:
    architecture, usual = HYBRIDS[NEMOTRON_FAMILIES[name]]
    return make_tiny(architecture, **usual | options)


@pytest.mark.parametrize("name", NEMOTRON_FAMILIES)
@pytest.mark.parametrize(
    "options",
    [{"use_conv_bias": True}, {"use_conv_bias": False}, {"n_group": 4, "topk_group": 2}],
    ids=str,
)
def test_logits_equal_transformers(make_tiny, paged_model, text, tmp_path, name, options):
    tiny = tiny_of(make_tiny, name, **options)
    folder = write_nemotron(tmp_path / "tiny.gguf", tiny.folder, name)
    tokens = text(30)
    logits = paged_model(folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


def test_blocks_are_what_their_tensors_say(make_tiny, paged_model, text, tmp_path, monkeypatch):
    """A file whose list of KV heads is 0 for blocks with attention, too."""
    tiny = tiny_of(make_tiny, "nemotron_h")
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_head_count_kv",
        lambda writer, counts: writer.add_array("nemotron_h.attention.head_count_kv", [0] * 6),
    )
    folder = write_nemotron(tmp_path / "tiny.gguf", tiny.folder, "nemotron_h")
    tokens = text(20)
    logits = paged_model(folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


def test_quantized_matrices_stay_as_they_are(make_tiny, tmp_path):
    sizes = {"hidden_size": 64, "mamba_head_dim": 32, "moe_intermediate_size": 32}
    tiny = tiny_of(make_tiny, "nemotron_h_moe", **sizes, moe_shared_expert_intermediate_size=32)
    folder = write_nemotron(tmp_path / "tiny.gguf", tiny.folder, "nemotron_h_moe", "Q8_0")
    config = load_model_config(folder)
    layers = load_block_weights(folder, config, torch.bfloat16).layers
    exact = load_weights(tiny.folder, load_model_config(tiny.folder)).layers
    for half, of_safetensors, name in [
        (layers[0].attention, exact[0].attention, "in"),
        (layers[0].feed_forward, exact[0].feed_forward, "gate_up.7"),
        (layers[0].feed_forward, exact[0].feed_forward, "down.2"),
    ]:
        matrix = half.matrices[name]
        assert isinstance(matrix, BlockMatrix)
        wanted = of_safetensors.matrices[name]
        torch.testing.assert_close(matrix.dequantized(), wanted, rtol=0.0, atol=0.01)


def test_quantized_experts_without_gates_are_multiplied(
    make_tiny, paged_model, text, tmp_path, monkeypatch
):
    """By an engine with these blocks: tokens are likely by the same weights in fp32."""
    sizes = {"hidden_size": 64, "mamba_head_dim": 32, "moe_intermediate_size": 32}
    tiny = tiny_of(make_tiny, "nemotron_h_moe", **sizes, moe_shared_expert_intermediate_size=32)
    folder = write_nemotron(tmp_path / "tiny.gguf", tiny.folder, "nemotron_h_moe", "Q8_0")
    monkeypatch.undo()  # compiled kernels are in the usual cache
    scheduler = SchedulerConfig(block_size=4, max_batch_size=4, chunk_max_tokens=16)
    config = EngineConfig(folder, scheduler, device="cpu", num_blocks=400)
    loaded = load_engine(config, lambda: 0.0)
    assert loaded.pool.tensor.dtype == torch.bfloat16
    prompts = (tuple(text(21)), tuple(text(40)[21:]))
    for prompt, tokens in zip(prompts, generate(loaded.engine, prompts), strict=True):
        logits = paged_model(folder).in_chunks([*prompt, *tokens][:-1], 8, TABLE)
        logits = logits[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert (logits.amax(1) - chosen).max() < 0.05 * logits.std()


def changed(monkeypatch: pytest.MonkeyPatch, **changes: torch.Tensor | None) -> None:
    """Files that are written lack the tensors that are None, and have others instead."""
    real = gguf_hybrids.nemotron_tensors

    def tensors(folder: Path, config: dict[str, Any]) -> gguf_hybrids.Tensors:
        found = real(folder, config) | {name.replace("__", "."): t for name, t in changes.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    monkeypatch.setattr(gguf_hybrids, "nemotron_tensors", tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk__0__ssm_in__weight": None}, r"tiny\.gguf: block 0 must have exactly one of ssm_in"),
        (
            {"blk__0__attn_q__weight": torch.zeros(4, 4)},
            r"tiny\.gguf: block 0 must have exactly one of ssm_in\.weight, attn_q\.weight",
        ),
        ({"blk__2__ssm_a": None}, r"tiny\.gguf: tensor 'blk\.2\.ssm_a' \[6\] is missing"),
        (
            {"blk__3__attn_k__weight": None},
            r"tensor 'blk\.3\.attn_k\.weight' \[16, 48\] is missing",
        ),
        ({"blk__1__exp_probs_b__bias": None}, r"'blk\.1\.exp_probs_b\.bias' \[8\] is missing"),
        ({"blk__6__ffn_down__weight": None}, r"'blk\.6\.ffn_down\.weight' \[48, 72\] is missing"),
        ({"blk__5__ssm_d": torch.zeros(7, 1)}, r"has the shape \[7\]; expected is \[6\]"),
    ],
)
def test_what_a_file_lacks_is_named(make_tiny, tmp_path, monkeypatch, changes, message):
    changed(monkeypatch, **changes)
    tiny = tiny_of(make_tiny, "nemotron_h_moe")

    def load() -> None:
        folder = write_nemotron(tmp_path / "tiny.gguf", tiny.folder, "nemotron_h_moe")
        load_weights(folder, load_model_config(folder))

    with pytest.raises(ModelLoadError, match=message) as error:
        load()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("moe_latent_size", 16, "'nemotron_h_moe.moe_latent_size' must be absent"),
        (
            "ssm.inner_size",
            61,
            "'nemotron_h_moe.ssm.inner_size' must be a multiple of the heads, 6",
        ),
        ("ssm.group_count", 4, "'n_groups' must be a divisor of mamba_num_heads"),
        ("expert_used_count", 9, "'num_experts_per_tok' must be at most"),
    ],
)
def test_sizes_that_are_not_supported_are_named(
    make_tiny, tmp_path, monkeypatch, key, value, message
):
    real = gguf.GGUFWriter.write_header_to_file

    def with_key(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"nemotron_h_moe.{key}", None)
        writer.add_uint32(f"nemotron_h_moe.{key}", value)
        real(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_key)
    tiny = tiny_of(make_tiny, "nemotron_h_moe")
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(write_nemotron(tmp_path / "tiny.gguf", tiny.folder, "nemotron_h_moe"))
