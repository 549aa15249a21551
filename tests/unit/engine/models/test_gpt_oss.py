"""gpt-oss's checkpoints as they are published: in MXFP4, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.config import load_model_config
from engine.checkpoint.quantized_blocks import BlockMatrix
from engine.checkpoint.shard import Shard
from engine.checkpoint.weights import load_block_weights, load_weights
from engine.cpu.backend import CpuBackend
from engine.models.decoder import DecoderModel
from protocol.errors import ModelLoadError
from tests.published_formats import change_config, float4
from tests.unit.engine.models.test_decoder import CLOSE, TABLE

NAME = "GptOssForCausalLM"
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}


def publish(tiny: Any) -> None:
    """Store random experts in blocks of MXFP4, and give the reference their values."""
    file = tiny.folder / "model.safetensors"
    tensors = load_file(file)
    chance = torch.Generator().manual_seed(3)
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        stored, values = float4(32).encode(experts * outputs, inputs, chance)
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = stored["weight_packed"].view(*shape, 16).contiguous()
        tensors[f"{name}_scales"] = stored["weight_scale"].view(shape).contiguous()
        parameter = tiny.reference.get_parameter(name)
        with torch.no_grad():
            parameter.copy_(values.view(experts, outputs, inputs).transpose(1, 2))
    save_file(tensors, file)
    change_config(tiny.folder, quantization_config={"quant_method": "mxfp4"})


def test_blocks_of_mxfp4(make_tiny, paged_model, text):
    tiny = make_tiny(NAME, **SIZES)
    publish(tiny)
    tokens = text(30)
    expected = tiny.expected_logits(tokens)
    for chunk in (30, 7):
        logits = paged_model(tiny.folder).in_chunks(tokens, chunk, TABLE)
        torch.testing.assert_close(logits, expected, **CLOSE)


def test_blocks_of_mxfp4_are_multiplied_as_they_are(make_tiny, kernels):
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    tiny = make_tiny(NAME, torch.bfloat16, **SIZES)
    publish(tiny)
    config = load_model_config(tiny.folder)
    weights = load_block_weights(tiny.folder, config, torch.bfloat16)
    values = load_weights(tiny.folder, config, dtype=torch.float32)
    for ours, plain in zip(weights.layers, values.layers, strict=True):
        for name, matrix in plain.feed_forward.matrices.items():
            packed = ours.feed_forward.matrices[name]
            assert isinstance(packed, BlockMatrix)
            assert torch.equal(packed.dequantized(), matrix)
    backend = CpuBackend(config, "bfloat16", kernels, weight_bits=12, keeps_blocks=True)
    assert DecoderModel(config, weights, backend)._fused is not None


def test_ranks_share_gate_and_up_alike(make_tiny):
    tiny = make_tiny(NAME)
    config = load_model_config(tiny.folder)
    whole = load_weights(tiny.folder, config).layers[1]
    parts = [load_weights(tiny.folder, config, shard=Shard(r, 2)).layers[1] for r in range(2)]
    gates, ups = zip(
        *(part.feed_forward.matrices["gate_up.2"].chunk(2) for part in parts), strict=True
    )
    assert torch.equal(torch.cat([*gates, *ups]), whole.feed_forward.matrices["gate_up.2"])
    gates, ups = zip(
        *(part.feed_forward.vectors["gate_up.2_bias"].chunk(2) for part in parts), strict=True
    )
    assert torch.equal(torch.cat([*gates, *ups]), whole.feed_forward.vectors["gate_up.2_bias"])
    sinks = [part.attention.vectors["sinks"] for part in parts]
    assert torch.equal(torch.cat(sinks), whole.attention.vectors["sinks"])


def test_what_a_published_configuration_leaves_out(tmp_path):
    config = {
        "architectures": [NAME],
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_model_config(tmp_path)
    assert found.head_dim == 64
    assert found.sliding_windows[:3] == (128, None, 128)
    assert (found.rope.kind, found.rope.factor, found.rope.truncate) == ("yarn", 32.0, False)
    assert found.rope.theta == 150_000.0
    assert (found.qkv_bias, found.o_bias, found.has_sinks) == (True, True, True)
    assert not found.tie_word_embeddings


def change_tensors(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("self_attn.sinks", None, r"layers\.1\.self_attn\.sinks' \[6\] is missing"),
        ("self_attn.sinks", (5,), r"1\.self_attn\.sinks' has the shape \[5\]; expected is \[6\]"),
        ("mlp.router.bias", None, r"1\.mlp\.router\.bias' \[6\] is missing"),
        ("mlp.experts.down_proj_bias", None, r"experts\.0\.down_proj\.bias' \[48\] is missing"),
        ("mlp.experts.gate_up_proj_bias", (6, 140), r"0\.gate_proj\.bias' has the shape \[70\]"),
        ("mlp.experts.gate_up_proj", (6, 48, 140), r"0\.gate_proj\.weight' has the shape \[70, 48"),
        ("mlp.experts.down_proj", (6, 48, 72), r"0\.down_proj\.weight' has the shape \[72, 48\]"),
    ],
)
def test_wrong_tensors_are_named(make_tiny, name, change, message):
    tiny = make_tiny(NAME)
    key = f"model.layers.1.{name}"

    def wrong(tensors: dict[str, torch.Tensor]) -> None:
        if change is None:
            del tensors[key]
        else:
            tensors[key] = torch.zeros(change)

    change_tensors(tiny.folder, wrong)
    with pytest.raises(ModelLoadError, match=message):
        load_weights(tiny.folder, load_model_config(tiny.folder))


def test_other_limits_of_the_activation_are_refused(make_tiny):
    tiny = make_tiny(NAME)
    change_config(tiny.folder, swiglu_limit=5.0)
    with pytest.raises(ModelLoadError, match="'swiglu_limit' must be 7 or absent"):
        load_model_config(tiny.folder)
