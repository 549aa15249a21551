"""All layers in one call: the same bits as layer by layer, by the same kernels, and however many
threads share the stages."""

from __future__ import annotations

import pytest
import torch

from protocol.layout import FP8

EXPERTS = {
    "num_experts": 12,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 80,
    "shared_expert_intermediate_size": 40,
}
GEMMA = {"sliding_window": 24, "sliding_window_pattern": 2}
FIRST, SECOND = list(range(60, 30, -1)), list(range(30))


@pytest.mark.parametrize(
    "told",
    [
        ("LlamaForCausalLM", {}, None),
        ("MistralForCausalLM", {"sliding_window": 24}, None),
        ("Qwen2ForCausalLM", {}, None),
        ("Qwen3ForCausalLM", {}, None),
        ("Qwen3ForCausalLM", {}, FP8),
        ("MixtralForCausalLM", {}, None),
        ("Gemma3ForCausalLM", GEMMA, None),
        ("GptOssForCausalLM", {"sliding_window": 24}, None),
        ("Gemma2ForCausalLM", {"sliding_window": 24}, None),
        ("Qwen2MoeForCausalLM", {**EXPERTS, "mlp_only_layers": [1]}, None),
    ],
)
def test_as_layer_by_layer(make_tiny, paged_model, text, kernels, told):
    architecture, overrides, kv_dtype = told
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    tiny = make_tiny(architecture, dtype=torch.bfloat16, **overrides)
    tokens = text(60)
    batches = [
        [(tokens[:37], 0, FIRST)],
        [(tokens[37:38], 37, FIRST), (tokens[:50], 0, SECOND)],
        [(tokens[38:39], 38, FIRST), (tokens[50:51], 50, SECOND)],
    ]
    results = []
    for fuses, threads in ((False, 1), (True, 1), (True, 2), (True, 3)):
        torch.set_num_threads(threads)
        paged = paged_model(tiny.folder, kernels=kernels, kv_dtype=kv_dtype)
        assert paged.model._fused is not None
        if not fuses:
            paged.model._fused = None
        logits = [paged.step(batch) for batch in batches]
        results.append((logits, paged.pool.tensor.view(torch.uint8)))
    (plain, plain_pool), *others = results
    for fused, fused_pool in others:
        assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))
        assert torch.equal(fused_pool, plain_pool)


def test_another_activation_goes_layer_by_layer(make_tiny, paged_model, kernels):
    tiny = make_tiny("LlamaForCausalLM", dtype=torch.bfloat16, hidden_act="gelu")
    assert paged_model(tiny.folder, kernels=kernels).model._fused is None


def test_tables_of_cos_and_sin_reach_as_far_as_contexts(make_tiny, paged_model, kernels):
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    tiny = make_tiny("LlamaForCausalLM", dtype=torch.bfloat16)
    results = []
    for fuses in (False, True):
        paged = paged_model(tiny.folder, kernels=kernels)
        paged.pool.tensor.fill_(0.25)
        if not fuses:
            paged.model._fused = None
        short, long = [([7], 3, FIRST)], [([7], 20_000, [3] * 20_000)]
        results.append([paged.step(batch) for batch in (short, long, short)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
