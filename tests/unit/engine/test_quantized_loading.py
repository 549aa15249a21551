"""Engines of quantized checkpoints: their dtype, what is refused, and what the log says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.config import load_model_config
from engine.checkpoint.quantized_blocks import BlockMatrix, MatrixStack
from engine.checkpoint.stored_tensors import FileTensors
from engine.checkpoint.weights import load_block_weights, load_weights
from engine.engine_config import EngineConfig
from engine.gpu.backend import CardBackend
from engine.gpu.choice import card_backend
from engine.gpu.fp8_linear import Fp8Linear, scaled_rows
from engine.loader import load_engine
from protocol.errors import ConfigError, ModelLoadError
from scheduling.scheduler import SchedulerConfig
from tests.published_formats import (
    FORMATS,
    FORMATS_IN_PANELS,
    change_config,
    compressed,
    is_linear,
    publish,
)
from worker.weights.choice import can_send

SCHEDULER = SchedulerConfig(block_size=16, max_batch_size=2, chunk_max_tokens=32)


@pytest.fixture
def folder(make_tiny) -> Path:
    """A checkpoint in fp16 with GPTQ's weights."""
    tiny = make_tiny(hidden_size=96, intermediate_size=160, dtype=torch.float16)
    publish(tiny.folder, FORMATS["gptq"])
    return tiny.folder


def config(folder: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(
        **{"folder": folder, "scheduler": SCHEDULER, "device": "cpu", "num_blocks": 4, **fields}
    )


def test_checkpoints_in_fp16_are_computed_in_bf16_on_a_cpu(folder, caplog):
    with caplog.at_level("INFO"):
        loaded = load_engine(config(folder, weights="exact16"), lambda: 0.0)
    assert loaded.pool.tensor.dtype == torch.bfloat16
    assert "0 quantized matrices are multiplied as they are, 21 are dequantized" in caplog.text
    loaded = load_engine(config(folder, dtype="float16"), lambda: 0.0)
    assert loaded.pool.tensor.dtype == torch.float16


def test_quantized_weights_are_multiplied_as_they_are(kernels, make_tiny, caplog):
    """KV of packed weights is not that of their rounded values."""
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8}
    tiny = make_tiny(**sizes, dtype=torch.bfloat16)
    publish(tiny.folder, FORMATS_IN_PANELS["awq"])
    with caplog.at_level("INFO"):
        auto = load_engine(config(tiny.folder), lambda: 0.0).engine
    assert "21 quantized matrices are multiplied as they are, 0 are dequantized" in caplog.text
    auto.warm_up()
    exact = load_engine(config(tiny.folder, weights="exact16"), lambda: 0.0).engine
    assert auto.layout.fingerprint != exact.layout.fingerprint


@pytest.fixture
def card(monkeypatch) -> tuple[torch.device, str]:
    """A card that multiplies fp8, as far as its backend asks; and the dtype."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("importlib.import_module", lambda name: None)
    return torch.device("cuda"), "bfloat16"


@pytest.mark.parametrize("name", ["gptq", "fp8 in blocks"])
def test_a_card_refuses_what_it_has_no_kernel_for(make_tiny, card, name):
    tiny = make_tiny(hidden_size=96, intermediate_size=160)
    publish(tiny.folder, FORMATS[name])
    model = load_model_config(tiny.folder)
    with pytest.raises(ConfigError, match=r"weights is 'auto', but no kernel .* use exact16"):
        card_backend(config(tiny.folder, attention="torch"), model, *card)
    exact = card_backend(config(tiny.folder, attention="torch", weights="exact16"), model, *card)
    assert not exact.keeps_blocks


def test_a_card_multiplies_fp8_with_a_scale_per_output_as_it_is(make_tiny, card):
    """Bias and plain weights stay; scales of the parts of q, k and v may differ."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8}
    tiny = make_tiny("Qwen2ForCausalLM", **sizes, dtype=torch.bfloat16)
    values = publish(
        tiny.folder, FORMATS["fp8 per tensor"], lambda name: "self_attn" in name and is_linear(name)
    )
    model = load_model_config(tiny.folder)
    chosen = card_backend(config(tiny.folder, attention="torch"), model, *card)
    assert (chosen.keeps_blocks, chosen.numerics) == (True, "fp8")
    backend = CardBackend(model, torch.device("cpu"), torch.bfloat16)
    weights = load_block_weights(tiny.folder, model, torch.bfloat16)
    layer = weights.layers[0]
    qkv = backend.linear(layer.attention.matrices["qkv"], layer.attention.vectors["qkv_bias"])
    assert isinstance(qkv, Fp8Linear)
    assert not isinstance(backend.linear(layer.feed_forward.matrices["down"], None), Fp8Linear)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = scaled_rows(x)
    parts = [values[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    exact = codes.float() * scales @ torch.cat(parts).T
    exact += layer.attention.vectors["qkv_bias"].float()
    torch.testing.assert_close(qkv(x).float(), exact, rtol=2**-8, atol=1e-3)


def test_a_card_takes_a_checkpoint_of_which_only_kv_is_quantized(make_tiny, card):
    tiny = make_tiny(dtype=torch.bfloat16)
    groups = {"kv": {"targets": ["re:.*attn"], "weights": None}}
    change_config(tiny.folder, quantization_config=compressed("dense", {}, config_groups=groups))
    model = load_model_config(tiny.folder)
    assert not card_backend(config(tiny.folder, attention="torch"), model, *card).keeps_blocks


def test_a_weight_that_is_fp8_in_part_is_joined_on_the_card(make_tiny):
    """Of q, k and v, only q is in fp8; its values come from the files, the others' are there."""
    tiny = make_tiny(hidden_size=128, num_attention_heads=8, dtype=torch.bfloat16)
    publish(tiny.folder, FORMATS["fp8 per tensor"], lambda name: "q_proj" in name)
    model, card = load_model_config(tiny.folder), torch.device("meta")
    weights = load_block_weights(tiny.folder, model, torch.bfloat16)
    qkv = weights.layers[0].attention.matrices["qkv"]
    assert isinstance(qkv, MatrixStack)
    codes, *others = qkv.parts
    assert isinstance(codes, BlockMatrix)
    placed = [each.to(card) for each in others if isinstance(each, torch.Tensor)]
    assert len(placed) == 2
    layer = CardBackend(model, card, torch.bfloat16).linear(MatrixStack([codes, *placed]), None)
    y = layer(torch.empty(3, 128, dtype=torch.bfloat16, device=card))
    assert (y.shape, y.device) == ((3, sum(qkv.counts)), card)


def test_a_card_refuses_experts_in_fp8(make_tiny, card):
    tiny = make_tiny("Qwen3MoeForCausalLM", hidden_size=96, num_experts=4, num_experts_per_tok=2)
    publish(tiny.folder, FORMATS["fp8 per tensor"], lambda name: "self_attn.o_proj" in name)
    with pytest.raises(ConfigError, match="multiplies experts in fp8; use exact16"):
        card_backend(config(tiny.folder), load_model_config(tiny.folder), *card)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"batch_invariant": True}, "with batch_invariant no kernel multiplies fp8"),
        ({"dtype": "float16"}, "fp8 needs dtype bfloat16, not float16"),
    ],
)
def test_settings_without_products_in_fp8_are_named(make_tiny, card, fields, reason):
    tiny = make_tiny(hidden_size=96, intermediate_size=160)
    publish(tiny.folder, FORMATS["fp8 per tensor"])
    arguments = (load_model_config(tiny.folder), card[0], fields.get("dtype", card[1]))
    with pytest.raises(ConfigError, match=f"{reason}; use exact16"):
        card_backend(config(tiny.folder, **fields), *arguments)


def test_quantized_weights_are_neither_sent_nor_received(folder):
    assert not can_send(folder)

    class Theirs(FileTensors):
        """As if another worker's."""

    with pytest.raises(ModelLoadError, match="quantized weights are read from files only"):
        load_weights(Theirs(folder), load_model_config(folder))
