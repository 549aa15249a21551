"""Mixtures of experts against transformers, whole and in chunks, by both kinds of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.config import load_model_config
from engine.checkpoint.weights import load_weights
from protocol.errors import ModelLoadError
from tests.effort import some
from tests.latent_models import LATENT_MODELS
from tests.unit.engine.models.test_decoder import CLOSE, TABLE

QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
DOTS = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral window": (
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 6},
    ),
    "qwen2": ("Qwen2MoeForCausalLM", {**QWEN, "shared_expert_intermediate_size": 40}),
    "qwen2 normalizes": (
        "Qwen2MoeForCausalLM",
        {**QWEN, "shared_expert_intermediate_size": 16, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen3": ("Qwen3MoeForCausalLM", {**QWEN, "norm_topk_prob": True}),
    "qwen3 all": ("Qwen3MoeForCausalLM", {**QWEN, "num_experts_per_tok": 8, "head_dim": 16}),
    "qwen3 some dense": (
        "Qwen3MoeForCausalLM",
        {**QWEN, "mlp_only_layers": [0], "num_hidden_layers": 4, "decoder_sparse_step": 2},
    ),
    "dots": ("Dots1ForCausalLM", DOTS),
    "dots in one group": (
        "Dots1ForCausalLM",
        {**DOTS, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "n_shared_experts": 2},
    ),
    "dots windows": (
        "Dots1ForCausalLM",
        {**DOTS, "sliding_window": 6, "max_window_layers": 1, "first_k_dense_replace": 0},
    ),
    "gpt-oss": ("GptOssForCausalLM", {}),
    "qwen3 gelu": ("Qwen3MoeForCausalLM", {**QWEN, "hidden_act": "gelu"}),
    **LATENT_MODELS,
}


def make(make_tiny, name: str, dtype: torch.dtype = torch.float32):
    architecture, options = MIXTURES[name]
    return make_tiny(architecture, dtype, **options)


def assert_most_as_close(logits: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Of the median token: where two experts score alike, bf16 may choose the other one."""
    errors = [(each - exact).abs().mean(-1).median() for each in (logits, theirs)]
    assert errors[0] < 1.1 * errors[1]


def stack_experts(tiny) -> None:
    """Store the checkpoint as transformers 5 holds it: one tensor for all experts."""
    for file in tiny.folder.glob("*.safetensors"):
        file.unlink()
    tiny.reference.save_pretrained(tiny.folder, save_original_format=False)


@pytest.mark.parametrize(
    "name", [*(name for name in MIXTURES if name not in LATENT_MODELS), *some(LATENT_MODELS, 5)]
)
def test_logits_equal_transformers_whole_and_in_chunks(make_tiny, paged_model, text, name):
    tiny = make(make_tiny, name)
    tokens = text(24)
    expected = tiny.expected_logits(tokens)
    for chunk in some((24, 7, 1), 2):
        logits = paged_model(tiny.folder).in_chunks(tokens, chunk, TABLE)
        torch.testing.assert_close(logits, expected, **CLOSE)


@pytest.mark.parametrize("name", ["mixtral", "qwen2", "qwen3", "dots", "deepseek v3"])
def test_one_tensor_of_all_experts_is_the_same_checkpoint(make_tiny, paged_model, text, name):
    tiny = make(make_tiny, name)
    one_by_one = load_weights(tiny.folder, load_model_config(tiny.folder))
    stack_experts(tiny)
    names = load_file(tiny.folder / "model.safetensors")
    assert any(each.endswith("mlp.experts.gate_up_proj") for each in names)
    stacked = load_weights(tiny.folder, load_model_config(tiny.folder))
    for one, other in zip(one_by_one.layers, stacked.layers, strict=True):
        for each, weight in one.feed_forward.matrices.items():
            assert torch.equal(weight, other.feed_forward.matrices[each])
    tokens = text(20)
    logits = paged_model(tiny.folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2", "qwen3", "dots", "deepseek v2 lite", "deepseek v3", "gpt-oss"]
)
def test_bf16_is_as_close_to_fp32_as_transformers_bf16_is(make_tiny, paged_model, text, name):
    tiny = make(make_tiny, name, torch.bfloat16)
    tokens = text(30)
    theirs = tiny.expected_logits(tokens)
    tiny.reference.float()
    assert_most_as_close(
        paged_model(tiny.folder).in_chunks(tokens, 8, TABLE), theirs, tiny.expected_logits(tokens)
    )


def rewrite(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_layers_that_predict_ahead_are_left_out(make_tiny, paged_model, text, caplog):
    """Checkpoints of DeepSeek V3 hold one behind the last layer, with tensors of its own kind."""
    tiny = make(make_tiny, "deepseek v3")
    names = ("eh_proj", "self_attn.q_a_proj", "mlp.experts.0.up_proj", "shared_head.norm")
    ahead = {f"model.layers.3.{name}.weight": torch.zeros(4, 4) for name in names}
    rewrite(tiny.folder, lambda tensors: tensors.update(ahead))
    tokens = text(20)
    with caplog.at_level("INFO", "engine.checkpoint.weights"):
        logits = paged_model(tiny.folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1
    assert "layers from 3 on predict further tokens ahead and are left out (4 tensors)" in lines[0]


def test_a_missing_expert_is_named(make_tiny):
    tiny = make(make_tiny, "qwen3")
    rewrite(tiny.folder, lambda t: t.pop("model.layers.1.mlp.experts.5.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"1\.mlp\.experts\.5\.up_proj.* is missing"):
        load_weights(tiny.folder, load_model_config(tiny.folder))


@pytest.mark.parametrize(
    ("part", "shape"), [("kv_a_proj_with_mqa", (32, 48)), ("kv_b_proj", (132, 24))]
)
def test_wrong_tensors_of_latent_attention_are_named(make_tiny, part, shape):
    tiny = make(make_tiny, "deepseek v3")
    name = f"model.layers.2.self_attn.{part}.weight"
    rewrite(tiny.folder, lambda t: t.update({name: torch.zeros(5, 48)}))
    expected = rf"safetensors: tensor '{name}' has the shape \[5, 48\]; expected is \{[*shape]}"
    with pytest.raises(ModelLoadError, match=expected):
        load_weights(tiny.folder, load_model_config(tiny.folder))
    rewrite(tiny.folder, lambda t: t.pop(name))
    with pytest.raises(ModelLoadError, match=f"tensor '{name}' .* is missing"):
        load_weights(tiny.folder, load_model_config(tiny.folder))


def test_a_stack_of_another_shape_is_named(make_tiny):
    tiny = make(make_tiny, "mixtral")
    stack_experts(tiny)
    name = "model.layers.0.mlp.experts.down_proj"
    rewrite(tiny.folder, lambda t: t.update({name: t[name].transpose(1, 2).contiguous()}))
    with pytest.raises(ModelLoadError, match=r"experts\.0\.down_proj.* has the shape \[72, 48\]"):
        load_weights(tiny.folder, load_model_config(tiny.folder))


def test_a_tensor_in_both_forms_is_refused(make_tiny):
    tiny = make(make_tiny, "mixtral")
    name = "model.layers.0.mlp.experts.down_proj"
    rewrite(tiny.folder, lambda t: t.update({name: torch.zeros(5, 48, 72)}))
    with pytest.raises(ModelLoadError, match=r"experts\.\d\.down_proj.* is there twice"):
        load_weights(tiny.folder, load_model_config(tiny.folder))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"num_local_experts": None}, "'num_local_experts' is missing"),
        ("mixtral", {"num_local_experts": 1}, "'num_local_experts' must be an integer of at least"),
        ("mixtral", {"num_local_experts": 10**6}, "'num_local_experts' must be an integer of at m"),
        ("mixtral", {"num_experts_per_tok": 6}, "'num_experts_per_tok' must be at most num_local"),
        ("qwen3", {"norm_topk_prob": "yes"}, "'norm_topk_prob' must be true or false"),
        ("qwen3", {"moe_intermediate_size": None}, "'moe_intermediate_size' is missing"),
        ("qwen3", {"mlp_only_layers": [0.5]}, "'mlp_only_layers' must be a list of layers"),
        ("qwen3", {"decoder_sparse_step": 0}, "'decoder_sparse_step' must be an integer of at"),
        ("qwen3", {"use_sliding_window": True}, "'use_sliding_window' must be false or absent"),
        (
            "qwen3",
            {"num_experts": 1024, "num_hidden_layers": 65},
            "'num_experts' must be at most 65536 for all layers together, not 1024",
        ),
        ("dots", {"n_group": 5}, "'n_group' must be a divisor of the number of experts"),
        ("dots", {"topk_group": 5}, "'topk_group' must be at most n_group"),
        ("dots", {"n_group": 12, "topk_group": 3}, "'n_group' must be so small that the chosen"),
        ("dots", {"topk_method": "best"}, "'topk_method' must be noaux_tc, greedy or group_lim"),
        ("dots", {"scoring_func": "tanh"}, "'scoring_func' must be softmax or sigmoid"),
        ("dots", {"routed_scaling_factor": 0}, "'routed_scaling_factor' must be a finite number"),
        ("dots", {"moe_layer_freq": 2}, "'moe_layer_freq' must be 1 or absent"),
        ("deepseek v3", {"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ("deepseek v3", {"kv_lora_rank": 0}, "'kv_lora_rank' must be an integer of at least 1"),
        ("deepseek v3", {"qk_rope_head_dim": 7}, "'qk_rope_head_dim' must be even, not 7"),
        ("deepseek v3", {"qk_nope_head_dim": None}, "'qk_nope_head_dim' is missing"),
        ("deepseek v3", {"v_head_dim": "10"}, "'v_head_dim' must be an integer of at least 1"),
        ("deepseek v3", {"q_lora_rank": -1}, "'q_lora_rank' must be an integer of at least 1"),
        ("deepseek v3", {"v_head_dim": 1 << 22}, "'v_head_dim' must be smaller with num_attentio"),
        ("deepseek v3", {"rope_interleave": 1}, "'rope_interleave' must be true or false"),
        ("deepseek v2", {"mlp_bias": True}, "'mlp_bias' must be false or absent"),
        ("qwen2", {"shared_expert_intermediate_size": -1}, "'shared_expert_intermediate_size' m"),
    ],
)
def test_wrong_keys_are_named(make_tiny, name, changes, message):
    file = make(make_tiny, name).folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(file.parent)


def test_an_untied_count_of_either_name_is_read(make_tiny):
    """Checkpoints of Qwen say `num_experts`, transformers 5 writes `num_local_experts`."""
    file = make(make_tiny, "qwen3").folder / "config.json"
    config = json.loads(file.read_text())
    for key in ("num_experts", "num_local_experts"):
        config.pop(key, None)
    for key in ("num_experts", "num_local_experts"):
        file.write_text(json.dumps(config | {key: 8}))
        experts = load_model_config(file.parent).experts
        assert experts is not None
        assert experts.count == 8


def test_the_sizes_that_torch_does_not_multiply_are_named(make_tiny, paged_model):
    tiny = make_tiny("Qwen3MoeForCausalLM", **(QWEN | {"moe_intermediate_size": 18}))
    with pytest.raises(Exception, match="multiples of 8, not matrices of 36 x 48"):
        paged_model(tiny.folder)


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "qwen2",
        "qwen3 some dense",
        "dots",
        "gpt-oss",
        "qwen3 gelu",
        "deepseek v2 lite",
        "deepseek v3",
    ],
)
def test_the_kernels_are_as_close_in_bf16_and_in_fp32(make_tiny, paged_model, text, kernels, name):
    tokens = text(24)
    tiny = make(make_tiny, name)
    for chunk in (24, 1):
        logits = paged_model(tiny.folder, kernels=kernels).in_chunks(tokens, chunk, TABLE)
        torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)
    tiny = make(make_tiny, name, torch.bfloat16)
    theirs = tiny.expected_logits(tokens)
    tiny.reference.float()
    exact = tiny.expected_logits(tokens)
    for chunk in some((24, 7, 1), 2):
        paged = paged_model(tiny.folder, kernels=kernels)
        assert (paged.model._fused is None) == (name == "qwen3 gelu" or name in LATENT_MODELS)
        assert_most_as_close(paged.in_chunks(tokens, chunk, TABLE), theirs, exact)
