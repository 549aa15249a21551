"""Mixtures in published quantized formats: their experts are multiplied as they are."""

from __future__ import annotations

import pytest
import torch

from engine.checkpoint.config import load_model_config
from engine.checkpoint.quantized_blocks import BlockMatrix
from engine.checkpoint.weights import load_block_weights, load_weights
from engine.cpu.backend import CpuBackend
from engine.cpu.native_experts import NativeExperts
from engine.layers.experts import TorchExperts
from engine.layers.experts_feed_forward import ExpertsFeedForward
from engine.layers.ops import TorchOps
from tests.effort import some
from tests.published_formats import FORMATS_IN_PANELS, publish

OPS = TorchOps("silu", 1e-5, torch.float32)
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 192,
    "num_attention_heads": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("name", some(FORMATS_IN_PANELS, 4))
def test_experts_equal_fp32_arithmetic_on_their_values(make_tiny, kernels, name):
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    tiny = make_tiny("Qwen3MoeForCausalLM", torch.bfloat16, **SIZES)
    publish(tiny.folder, FORMATS_IN_PANELS[name], lambda weight: ".experts." in weight)
    config = load_model_config(tiny.folder)
    packed = load_block_weights(tiny.folder, config, torch.bfloat16).layers[1].feed_forward
    values = load_weights(tiny.folder, config, dtype=torch.float32).layers[1].feed_forward
    assert isinstance(packed.matrices["gate_up.3"], BlockMatrix)
    backend = CpuBackend(config, "bfloat16", kernels, weight_bits=12)
    experts = ExpertsFeedForward(config, packed, backend).experts
    reference = ExpertsFeedForward(config, values, CpuBackend(config, "float32")).experts
    assert isinstance(experts, NativeExperts)
    assert isinstance(reference, TorchExperts)
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = reference(x.float(), OPS, None)
    atol = 2**-7 * float(expected.abs().max())
    torch.testing.assert_close(experts(x, OPS, None).float(), expected, rtol=2**-6, atol=atol)
