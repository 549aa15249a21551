"""Hybrids against transformers: layers with a gated delta rule or a state space beside full
attention."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.config import load_model_config
from engine.checkpoint.weights import load_weights
from engine.layers.recurrent import state_space
from engine.layers.recurrent.delta_rule import DeltaInputs, chunked, one_each
from protocol.errors import ModelLoadError
from tests.effort import some
from tests.hybrid_models import HYBRIDS
from tests.unit.engine.models.test_decoder import CLOSE, TABLE


def make(make_tiny, name: str, dtype: torch.dtype = torch.float32):
    architecture, options = HYBRIDS[name]
    return make_tiny(architecture, dtype, **options)


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_equal_transformers_whole_and_in_chunks_of_any_size(
    make_tiny, paged_model, text, name
):
    tiny = make(make_tiny, name)
    tokens = text(45)
    expected = tiny.expected_logits(tokens)
    for chunk in [45, 7, *some(range(1, 45), 1)]:
        logits = paged_model(tiny.folder).in_chunks(tokens, chunk, TABLE)
        torch.testing.assert_close(logits, expected, **CLOSE)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "nemotron-h"])
def test_longer_than_chunks_of_the_rule(make_tiny, paged_model, text, name):
    architecture, options = HYBRIDS[name]
    tiny = make_tiny(architecture, max_position_embeddings=512, **options)
    tokens = text(300)
    logits = paged_model(tiny.folder, num_blocks=80).in_chunks(tokens, 150, range(80))
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_mixed_batch_equals_separate_runs(make_tiny, paged_model, text, name):
    tiny = make(make_tiny, name)
    texts = [text(3), text(21)[1:], text(33)[2:], text(16)[3:], text(9)[8:]]
    tables = [[1], [2, 3, 4, 5, 6, 7], [*range(8, 17)], [20, 21, 22, 23], [24]]
    paged = paged_model(tiny.folder)
    for tokens, table in zip(texts[:3], tables[:3], strict=True):
        paged.in_chunks(tokens[:-1], 64, table)
    paged.in_chunks(texts[3][:5], 64, tables[3])
    # Three decodes around a chunk of the fourth text, and a new text of one token.
    parts = [(t[-1:], len(t) - 1, b) for t, b in zip(texts[:3], tables[:3], strict=True)]
    rest = [(texts[3][5:], 5, tables[3]), parts[2], (texts[4], 0, tables[4])]
    logits = paged.step([*parts[:2], *rest])
    each = [tiny.expected_logits(tokens) for tokens in texts]
    wanted = [each[0][-1:], each[1][-1:], each[3][5:], each[2][-1:], each[4]]
    torch.testing.assert_close(logits, torch.cat(wanted), **CLOSE)


def test_states_within_a_chunk_are_stored_too(make_tiny, paged_model, text):
    """A step that stores the state at further positions gives the same logits, and a text goes on
    from such a state as from its own."""
    tiny = make(make_tiny, "qwen3-next")
    tokens = text(40)
    paged = paged_model(tiny.folder)
    paged._slots.cuts = [12, 20, 32]
    logits = paged.in_chunks(tokens, 27, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)
    paged._slots._held[TABLE[0]] = paged._slots.left[-1]  # of position 32
    again = paged.step([(tokens[32:], 32, TABLE)])
    torch.testing.assert_close(again, tiny.expected_logits(tokens)[32:], **CLOSE)


ALL_EXPERTS = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
"""Each token gets all experts. With fewer, rounding may change the choice of two that score alike,
and the states carry the difference to all later tokens."""


@pytest.mark.parametrize("name", HYBRIDS)
def test_bf16_is_as_close_to_fp32_as_transformers_bf16_is(
    make_tiny, paged_model, text, kernels, name
):
    architecture, options = HYBRIDS[name]
    options = options | (ALL_EXPERTS if "num_experts_per_tok" in options else {})
    tiny = make_tiny(architecture, torch.bfloat16, **options)
    tokens = text(40)
    theirs = tiny.expected_logits(tokens)
    tiny.reference.float()
    exact = tiny.expected_logits(tokens)
    for each in (None, kernels):
        logits = paged_model(tiny.folder, kernels=each).in_chunks(tokens, 8, TABLE)
        assert (logits - exact).abs().mean() < 1.1 * (theirs - exact).abs().mean()


def test_the_chunked_rule_equals_the_rule_token_by_token():
    torch.manual_seed(2)
    num_tokens, heads, key_dim, value_dim = 150, 4, 8, 6
    whole = DeltaInputs(
        torch.randn(num_tokens, 2, key_dim),
        torch.randn(num_tokens, 2, key_dim),
        torch.randn(num_tokens, heads, value_dim),
        -torch.rand(num_tokens, heads),
        torch.rand(num_tokens, heads),
    )
    state = torch.randn(1, heads, key_dim, value_dim)
    out, last = chunked(whole, state[0].clone())
    one_by_one = [
        one_each(DeltaInputs(*(x[at : at + 1] for x in whole)), state) for at in range(num_tokens)
    ]
    torch.testing.assert_close(out, torch.cat(one_by_one), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, state[0], rtol=1e-4, atol=1e-5)


def test_the_chunked_space_equals_the_space_token_by_token():
    torch.manual_seed(2)
    num_tokens, heads, groups, head_dim, size = 150, 4, 2, 6, 8
    whole = state_space.SpaceInputs(
        torch.randn(num_tokens, heads, head_dim),
        torch.randn(num_tokens, groups, size),
        torch.randn(num_tokens, groups, size),
        torch.rand(num_tokens, heads),
        -torch.rand(num_tokens, heads),
    )
    state = torch.randn(1, heads, head_dim, size)
    out, last = state_space.chunked(whole, state[0].clone())
    one_by_one = [
        state_space.one_each(state_space.SpaceInputs(*(x[at : at + 1] for x in whole)), state)
        for at in range(num_tokens)
    ]
    torch.testing.assert_close(out, torch.cat(one_by_one), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, state[0], rtol=1e-4, atol=1e-5)


def rewrite_config(tiny, **changes: object) -> None:
    file = tiny.folder / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    file.write_text(json.dumps(config))


def test_published_files_of_qwen3_5_for_images_serve_text(make_tiny, paged_model, text):
    """Keys in `text_config`, names with a prefix, and tensors for images that are not loaded."""
    tiny = make(make_tiny, "qwen3.5")
    tokens = text(20)
    file = tiny.folder / "config.json"
    inner = json.loads(file.read_text())
    inner.pop("architectures")
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": inner | {"attn_output_gate": True},
        "vision_config": {"depth": 1},
        "tie_word_embeddings": False,
    }
    file.write_text(json.dumps(outer))
    weights = tiny.folder / "model.safetensors"
    renamed = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(weights).items()
    }
    more = {"model.visual.patch_embed.weight": torch.zeros(4), "mtp.fc.weight": torch.zeros(2, 2)}
    save_file(renamed | more, weights)
    logits = paged_model(tiny.folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
@pytest.mark.parametrize("is_old", [True, False])
def test_yarn_on_heads_that_are_rotated_in_part(make_tiny, paged_model, text, name, is_old):
    """As users of long contexts write it, also by the old keys."""
    architecture, options = HYBRIDS[name]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    rope = options["rope_parameters"] | yarn
    tiny = make_tiny(architecture, **options | {"rope_parameters": rope})
    if is_old:
        yarn["type"] = yarn.pop("rope_type")
        old = {"rope_scaling": yarn, "rope_theta": 500.0, "partial_rotary_factor": 0.5}
        rewrite_config(tiny, rope_parameters=None, **old)
    tokens = text(45)
    logits = paged_model(tiny.folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("qwen3-next", "mtp.layers.0.self_attn.q_proj.weight"),
        ("qwen3.5 moe", "mtp.fc.weight"),
        ("nemotron-h moe", "mtp.layers.1.mixer.experts.0.up_proj.weight"),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(
    make_tiny, paged_model, text, family, extra
):
    tiny, tokens = make(make_tiny, family), text(20)
    rewrite_config(tiny, num_nextn_predict_layers=1)
    file = tiny.folder / "model.safetensors"
    save_file(load_file(file) | {extra: torch.ones(4, 4)}, file)
    logits = paged_model(tiny.folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


def test_layers_by_their_interval_and_names_by_model_type(make_tiny, paged_model, text):
    """As published configurations of Qwen3-Next say it: no list of layers, keys outside."""
    architecture, options = HYBRIDS["qwen3-next"]
    turns = ["linear_attention", "linear_attention", "full_attention"] * 2
    tiny = make_tiny(architecture, **options | {"layer_types": turns, "num_hidden_layers": 6})
    rewrite_config(
        tiny,
        architectures=None,
        layer_types=None,
        full_attention_interval=3,
        rope_parameters=None,
        rope_theta=500.0,
        partial_rotary_factor=0.5,
    )
    tokens = text(20)
    logits = paged_model(tiny.folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 3}, "'linear_num_value_heads' must be a multiple of linear_nu"),
        (
            {"linear_conv_kernel_dim": 1},
            "'linear_conv_kernel_dim' must be an integer of at least",
        ),
        ({"layer_types": ["linear_attention"] * 4}, "'layer_types' must be such that one of 4"),
        ({"layer_types": ["mamba"] * 4}, "'layer_types' must be made of"),
        ({"attn_output_gate": False}, "'attn_output_gate' must be true or absent"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.45}},
            "'partial_rotary_factor' must be",
        ),
    ],
)
def test_what_is_not_supported_is_named(make_tiny, changes, message):
    tiny = make(make_tiny, "qwen3-next")
    rewrite_config(tiny, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(tiny.folder)


def test_published_files_of_nemotron_h_say_blocks_by_signs(make_tiny, paged_model, text):
    """And call all layers together the backbone."""
    tiny = make(make_tiny, "nemotron-h")
    rewrite_config(
        tiny,
        layers_block_type=None,
        layer_types=None,
        hybrid_override_pattern="M-M*-M",
        head_dim=None,
        attention_head_dim=16,
        time_step_limit=[0.0, float("inf")],
    )
    weights = tiny.folder / "model.safetensors"
    renamed = {re.sub(r"^model\.", "backbone.", k): v for k, v in load_file(weights).items()}
    assert "backbone.embeddings.weight" in renamed
    save_file(renamed, weights)
    tokens = text(20)
    logits = paged_model(tiny.folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


EXPERTS = ["mamba", "moe", "attention"]


def test_steps_of_nemotron_h_are_clamped(make_tiny, paged_model, text):
    """With limits that leave one step, it is as if the weights gave that step to every token."""
    tiny, tokens = make(make_tiny, "nemotron-h"), text(20)
    rewrite_config(tiny, time_step_limit=[0.5, 0.5])
    clamped = paged_model(tiny.folder).in_chunks(tokens, 8, TABLE)
    rewrite_config(tiny, time_step_limit=None)
    weights = tiny.folder / "model.safetensors"
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if name.endswith(".mixer.in_proj.weight"):
            tensor[-HYBRIDS["nemotron-h"][1]["mamba_num_heads"] :] = 0.0
        elif name.endswith(".dt_bias"):
            tensor.fill_(0.5).expm1_().log_()  # whose softplus is 0.5
    save_file(tensors, weights)
    constant = paged_model(tiny.folder).in_chunks(tokens, 8, TABLE)
    torch.testing.assert_close(clamped, constant, **CLOSE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hybrid_override_pattern": "M-X*"},
            r"'hybrid_override_pattern' must be made of M, \*, -, E",
        ),
        ({"layers_block_type": ["mamba", "rwkv", "attention"]}, "'layers_block_type' must be made"),
        ({"layers_block_type": ["moe", "mamba", "attention"]}, "must be such that each moe"),
        ({"layers_block_type": EXPERTS, "moe_latent_size": 16}, "'moe_latent_size' must be absent"),
        ({"layers_block_type": EXPERTS, "num_experts_per_tok": 9}, "'num_experts_per_tok' must"),
        ({"layers_block_type": ["mlp", "mamba", "attention"]}, "must be such that each mlp"),
        ({"layers_block_type": ["mamba", "mlp", "mlp", "attention"]}, "must be such that each mlp"),
        ({"layers_block_type": ["mamba"]}, "of both at least one"),
        ({"layers_block_type": [["mamba"]]}, "'layers_block_type' must be made of"),
        ({"mlp_hidden_act": "silu"}, "'mlp_hidden_act' must be relu2"),
        ({"n_groups": 4}, r"'n_groups' must be a divisor of mamba_num_heads \(6\)"),
        ({"use_bias": True}, "'use_bias' must be false"),
        ({"time_step_limit": [1.0]}, "'time_step_limit' must be a list of two numbers"),
        ({"time_step_limit": [1.0, 0.1]}, "'time_step_limit' must be a list of two numbers, of"),
        ({"time_step_limit": [1.0, "a"]}, "'time_step_limit' must be a list of two numbers, of"),
    ],
)
def test_what_of_nemotron_h_is_not_supported_is_named(make_tiny, changes, message):
    tiny = make(make_tiny, "nemotron-h")
    if "hybrid_override_pattern" in changes:
        changes |= {"layers_block_type": None, "layer_types": None}
    rewrite_config(tiny, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(tiny.folder)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3-next", "model.layers.0.linear_attn.A_log"),
        ("qwen3.5", "model.layers.1.self_attn.k_norm.weight"),
        ("nemotron-h", "model.layers.4.mixer.up_proj.weight"),
        ("nemotron-h", "model.layers.5.mixer.conv1d.bias"),
    ],
)
def test_a_tensor_that_is_missing_is_named(make_tiny, name, tensor):
    tiny = make(make_tiny, name)
    file = tiny.folder / "model.safetensors"
    tensors = load_file(file)
    stored = tensor if tensor in tensors else tensor.replace("model.", "backbone.", 1)
    del tensors[stored]
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=rf"{re.escape(tensor)}' \[.*\] is missing"):
        load_weights(tiny.folder, load_model_config(tiny.folder))


def test_a_tensor_of_another_shape_is_named(make_tiny):
    tiny = make(make_tiny, "qwen3.5")
    file = tiny.folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.2.linear_attn.conv1d.weight"
    save_file(tensors | {name: tensors[name].squeeze(1)}, file)
    with pytest.raises(ModelLoadError, match=r"2\.linear_attn\.conv1d.*expected is \[\d+, 1"):
        load_weights(tiny.folder, load_model_config(tiny.folder))
