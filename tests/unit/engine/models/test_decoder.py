"""Logits against transformers: every architecture, every rope, whole, in chunks, from a prefix."""

from __future__ import annotations

import inspect
import json
import math
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.effort import in_turn, some

ARCHITECTURES = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SeedOssForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}
CLOSE = {"rtol": 0.0, "atol": 1e-4}
# Scattered, so that positions and blocks differ; the last entry is beyond every text here.
TABLE = [9, 3, 27, 1, 30, 12, 5, 22, 17, 8, 40, 2, 33, 21, 14, 6, 39, 11, 63]


def rope(name: str, architecture: str = "") -> dict[str, Any]:
    parameters = {"rope_theta": 500.0, **ROPES[name]}
    if architecture != "Gemma3ForCausalLM":
        return {"rope_parameters": parameters}
    local = {"rope_type": "default", "rope_theta": 100.0}
    return {"rope_parameters": {"full_attention": parameters, "sliding_attention": local}}


@pytest.mark.parametrize(("architecture", "rope_name"), in_turn(ARCHITECTURES, ROPES))
def test_logits_equal_transformers_whole_and_in_chunks(
    make_tiny, paged_model, text, architecture, rope_name
):
    tiny = make_tiny(architecture, **rope(rope_name, architecture))
    tokens = text(45)
    expected = tiny.expected_logits(tokens)
    assert expected.std() > 0.5  # otherwise 1e-4 would prove little
    for chunk in some((45, 16, 7, 4, 1), 3):
        logits = paged_model(tiny.folder).in_chunks(tokens, chunk, TABLE)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, **CLOSE)


@pytest.mark.parametrize(
    ("beta", "dtype"), [(0.1, torch.float32), (2.0, torch.float32), (0.1, torch.bfloat16)]
)
def test_queries_grow_with_their_positions_as_in_transformers(
    make_tiny, paged_model, text, beta, dtype
):
    """Ministral 3; the original context of 16 tokens is left behind twice."""
    parameters = {
        "rope_theta": 500.0,
        "llama_4_scaling_beta": beta,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        **ROPES["yarn"],
    }
    tiny = make_tiny("Ministral3ForCausalLM", dtype, rope_parameters=parameters)
    tokens = text(45)
    expected = tiny.expected_logits(tokens)
    paged = paged_model(tiny.folder)
    assert paged.config.rope.query_scaling_beta == beta
    close = CLOSE if dtype == torch.float32 else {"rtol": 0.0, "atol": 0.4}
    for chunk in (45, 7, 1):
        torch.testing.assert_close(paged.in_chunks(tokens, chunk, TABLE), expected, **close)
    config = json.loads((tiny.folder / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling"):
        (config.get(key) or {}).pop("llama_4_scaling_beta", None)
    (tiny.folder / "config.json").write_text(json.dumps(config))
    unscaled = paged_model(tiny.folder).in_chunks(tokens, 45, TABLE)
    assert (unscaled - expected)[:16].abs().max() < 0.3
    assert (unscaled - expected)[16:].abs().max() > 0.3 * beta


def test_queries_grow_with_their_positions_where_kernels_run(make_tiny, paged_model, text, kernels):
    parameters = {"rope_theta": 500.0, "llama_4_scaling_beta": 0.5, **ROPES["yarn"]}
    tokens = text(40)
    tiny = make_tiny("Ministral3ForCausalLM", rope_parameters=parameters)
    logits = paged_model(tiny.folder, kernels=kernels).in_chunks(tokens, 16, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)
    tiny = make_tiny("Ministral3ForCausalLM", torch.bfloat16, rope_parameters=parameters)
    theirs = tiny.expected_logits(tokens)
    tiny.reference.float()
    logits = paged_model(tiny.folder, kernels=kernels).in_chunks(tokens, 16, TABLE)
    assert_as_close(logits, theirs, tiny.expected_logits(tokens))


@pytest.mark.parametrize(
    ("base", "name", "changes"),
    [
        ("LlamaForCausalLM", "LLaMAForCausalLM", {"architectures": ["LLaMAForCausalLM"]}),
        ("LlamaForCausalLM", "LlamaForCausalLM", {"model_type": "llama"}),
        ("LlamaForCausalLM", "IQuestCoderForCausalLM", {"model_type": "iquestcoder"}),
        ("LlamaForCausalLM", "Telechat3ForCausalLM", {"model_type": "telechat3"}),
        ("LlamaForCausalLM", "InternLM3ForCausalLM", {"model_type": "internlm3", "bias": False}),
        ("Qwen2ForCausalLM", "MiMoForCausalLM", {"model_type": "mimo"}),
        ("SeedOssForCausalLM", "SeedOssForCausalLM", {"model_type": "seed_oss"}),
        ("Qwen3ForCausalLM", "Qwen3ForCausalLM", {"model_type": "qwen3"}),
    ],
)
def test_another_name_of_an_architecture_computes_the_same(
    make_tiny, paged_model, text, base, name, changes
):
    """Also without a name, by the model type; layers that only predict ahead are left out."""
    tiny = make_tiny(base)
    file = tiny.folder / "config.json"
    config = json.loads(file.read_text())
    del config["architectures"]
    file.write_text(json.dumps(config | changes))
    if name == "MiMoForCausalLM":
        weights = tiny.folder / "model.safetensors"
        ahead = {"model.mtp_layers.0.input_proj.weight": torch.zeros(4, 4)}
        save_file(load_file(weights) | ahead, weights)
    tokens = text(20)
    paged = paged_model(tiny.folder)
    assert paged.config.architecture == name
    torch.testing.assert_close(
        paged.in_chunks(tokens, 8, TABLE), tiny.expected_logits(tokens), **CLOSE
    )


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("name", ["InternLM3ForCausalLM", "IQuestCoderForCausalLM"])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_llama_by_another_configuration_of_transformers(
    make_tiny, paged_model, text, name, has_biases, is_named
):
    tiny = make_tiny(name, attention_bias=has_biases, mlp_bias=has_biases)
    file = tiny.folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architectures": [name] if is_named else None}))
    tokens = text(20)
    paged = paged_model(tiny.folder)
    assert paged.config.architecture == name
    torch.testing.assert_close(
        paged.in_chunks(tokens, 8, TABLE), tiny.expected_logits(tokens), **CLOSE
    )


def test_the_rope_of_telechat3_is_yarn_with_another_scale(make_tiny, paged_model, text):
    scaled = {"rope_theta": 500.0, **ROPES["yarn"], "attention_factor": 0.07 * math.log(4.0) + 1.0}
    tiny = make_tiny(rope_parameters=scaled)
    file = tiny.folder / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    table = {**ROPES["yarn"], "rope_type": "telechat3-yarn", "type": "telechat3-yarn"}
    own = {"architectures": ["Telechat3ForCausalLM"], "rope_scaling": table, "rope_theta": 500.0}
    file.write_text(json.dumps(config | own))
    tokens = text(45)
    logits = paged_model(tiny.folder).in_chunks(tokens, 16, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prefix_in_the_pool_gives_the_same_logits(make_tiny, paged_model, text, architecture):
    tiny = make_tiny(architecture)
    tokens = text(40)
    paged = paged_model(tiny.folder)
    paged.in_chunks(tokens[:32], 32, TABLE)
    other_table = [*TABLE[:8], 50, 51]  # shares the prefix's 8 blocks, then goes its own way
    logits = paged.step([(tokens[32:], 32, other_table)])
    torch.testing.assert_close(logits, tiny.expected_logits(tokens)[32:], **CLOSE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_mixed_batch_equals_separate_runs(make_tiny, paged_model, text, architecture):
    tiny = make_tiny(architecture)
    texts = [text(3), text(21)[1:], text(33)[2:], text(16)[3:]]
    tables = [[1], [2, 3, 4, 5, 6, 7], [*range(8, 17)], [20, 21, 22, 23]]
    paged = paged_model(tiny.folder)
    for tokens, table in zip(texts[:3], tables[:3], strict=True):
        paged.in_chunks(tokens[:-1], 64, table)
    paged.in_chunks(texts[3][:5], 64, tables[3])
    # Three decodes, of very different lengths, around a chunk of the fourth text.
    parts = [(t[-1:], len(t) - 1, b) for t, b in zip(texts[:3], tables[:3], strict=True)]
    logits = paged.step([*parts[:2], (texts[3][5:], 5, tables[3]), parts[2]])
    expected = [tiny.expected_logits(tokens) for tokens in texts]
    wanted = torch.cat([expected[0][-1:], expected[1][-1:], expected[3][5:], expected[2][-1:]])
    torch.testing.assert_close(logits, wanted, **CLOSE)


@pytest.mark.parametrize("rope_name", ["linear", "dynamic", "llama3", "yarn"])
def test_each_rope_kind_changes_the_logits(make_tiny, text, rope_name):
    """Otherwise the comparison above would not see a kind that is ignored."""
    tokens = text(45)
    plain = make_tiny(**rope("default")).expected_logits(tokens)
    overrides = rope(rope_name)
    if rope_name == "dynamic":
        overrides["max_position_embeddings"] = 16  # it changes nothing up to there
    kind = make_tiny(**overrides).expected_logits(tokens)
    assert (plain - kind).abs().max() > 0.01


def test_dynamic_rope_beyond_the_trained_length_equals_generation_token_by_token(
    make_tiny, paged_model, text
):
    tiny = make_tiny(max_position_embeddings=16, **rope("dynamic"))
    tokens = text(40)
    # transformers 5.24 renamed the parameter.
    names = inspect.signature(tiny.reference.forward).parameters
    cache = {"cache" if "cache" in names else "past_key_values": transformers.DynamicCache()}
    expected = []
    with torch.no_grad():
        for token in tokens:
            out = tiny.reference(torch.tensor([[token]]), use_cache=True, **cache)
            expected.append(out.logits[0])
    for chunk in (40, 9, 1):
        logits = paged_model(tiny.folder).in_chunks(tokens, chunk, TABLE)
        torch.testing.assert_close(logits, torch.cat(expected), **CLOSE)


YARNS: list[dict[str, Any]] = [
    {"attention_factor": 1.7},
    {"beta_fast": 8.0, "beta_slow": 2.0},
    {"mscale": 0.8, "mscale_all_dim": 0.3},
    {"mscale": 0.8},
    {"truncate": False},
    {"original_max_position_embeddings": 64},
]


@pytest.mark.parametrize("extra", YARNS, ids=str)
def test_yarn_options_equal_transformers(make_tiny, paged_model, text, extra):
    parameters = {"rope_theta": 500.0, **ROPES["yarn"], **extra}
    tiny = make_tiny(rope_parameters=parameters)
    tokens = text(45)
    logits = paged_model(tiny.folder).in_chunks(tokens, 16, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    ("LlamaForCausalLM", {"attention_bias": True}),
    ("LlamaForCausalLM", {"mlp_bias": True}),
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("Qwen3ForCausalLM", {"attention_bias": True}),
    ("LlamaForCausalLM", {"head_dim": 20}),
    ("MistralForCausalLM", {"head_dim": 12}),
    ("LlamaForCausalLM", {"num_key_value_heads": 6}),
    ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    ("LlamaForCausalLM", {"rms_norm_eps": 0.1}),
    ("LlamaForCausalLM", {"hidden_act": "gelu"}),
    ("LlamaForCausalLM", {"hidden_act": "gelu_new"}),
    ("LlamaForCausalLM", {"hidden_act": "gelu_fast"}),
    ("LlamaForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}),
    ("MistralForCausalLM", {"sliding_window": 6}),
    ("MistralForCausalLM", {"sliding_window": 4}),
    ("MistralForCausalLM", {"sliding_window": 1}),
    ("Gemma2ForCausalLM", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("Gemma2ForCausalLM", {"layer_types": ["full_attention"] * 3, "attention_bias": True}),
    ("Gemma3ForCausalLM", {"final_logit_softcapping": 6.0, "sliding_window_pattern": 3}),
    ("Gemma3ForCausalLM", {"attention_bias": True, "hidden_activation": "gelu"}),
    ("MistralForCausalLM", {"sliding_window": None}),
    (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    (
        "Qwen3ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
]


@pytest.mark.parametrize(("variant", "chunk"), in_turn(VARIANTS, [45, 13, 1]), ids=str)
def test_variants_equal_transformers(make_tiny, paged_model, text, variant, chunk):
    architecture, overrides = variant
    tiny = make_tiny(architecture, **overrides)
    tokens = text(45)
    logits = paged_model(tiny.folder).in_chunks(tokens, chunk, TABLE)
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)


def test_the_window_matters(make_tiny, text):
    """Otherwise the variants above would not see a window that is ignored."""
    tokens = text(45)
    narrow = make_tiny("MistralForCausalLM", sliding_window=6).expected_logits(tokens)
    wide = make_tiny("MistralForCausalLM", sliding_window=None).expected_logits(tokens)
    torch.testing.assert_close(narrow[:6], wide[:6], **CLOSE)
    assert (narrow[6:] - wide[6:]).abs().max() > 0.1


def test_decodes_with_windows_in_one_batch(make_tiny, paged_model, text):
    tiny = make_tiny("MistralForCausalLM", sliding_window=6)
    lengths = [1, 2, 5, 6, 7, 12, 30, 31]
    tables = [[8 * index + block for block in range(8)] for index in range(len(lengths))]
    paged = paged_model(tiny.folder)
    for length, table in zip(lengths, tables, strict=True):
        if length > 1:
            paged.in_chunks(text(length)[:-1], 64, table)
    logits = paged.step(
        [
            (text(length)[-1:], length - 1, table)
            for length, table in zip(lengths, tables, strict=True)
        ]
    )
    expected = torch.cat([tiny.expected_logits(text(length))[-1:] for length in lengths])
    torch.testing.assert_close(logits, expected, **CLOSE)


def test_logits_only_for_the_rows_wanted(make_tiny, paged_model, text):
    tiny = make_tiny()
    tokens = text(10)
    expected = tiny.expected_logits(tokens)
    paged = paged_model(tiny.folder)

    def logits_of(rows: list[int]) -> torch.Tensor:
        paged.step([(tokens, 0, TABLE)])  # plans the same batch
        return paged.model.forward(
            torch.tensor(tokens),
            torch.arange(10),
            paged.attention,
            torch.tensor(rows, dtype=torch.int64),
        )

    torch.testing.assert_close(logits_of([9, 2]), expected[[9, 2]], **CLOSE)
    assert logits_of([]).shape == (0, 97)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bf16_is_as_close_to_fp32_as_transformers_bf16_is(
    make_tiny, paged_model, text, architecture
):
    tiny = make_tiny(architecture, dtype=torch.bfloat16)
    tokens = text(30)
    theirs = tiny.expected_logits(tokens)
    tiny.reference.float()  # the same, rounded, weights
    exact = tiny.expected_logits(tokens)
    paged = paged_model(tiny.folder)
    assert paged.model.dtype == torch.bfloat16
    assert paged.pool.tensor.dtype == torch.bfloat16
    assert_as_close(paged.in_chunks(tokens, 8, TABLE), theirs, exact)


def assert_as_close(logits: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().mean() < 1.1 * (theirs - exact).abs().mean()


@pytest.mark.parametrize(("architecture", "hidden_act"), in_turn(ARCHITECTURES, ["silu", "gelu"]))
def test_the_kernels_are_as_close_in_bf16_and_in_fp32(
    make_tiny, paged_model, text, kernels, architecture, hidden_act
):
    tokens = text(45)
    tiny = make_tiny(architecture, hidden_act=hidden_act)
    for chunk in some((45, 16, 7, 1), 2):
        logits = paged_model(tiny.folder, kernels=kernels).in_chunks(tokens, chunk, TABLE)
        torch.testing.assert_close(logits, tiny.expected_logits(tokens), **CLOSE)
    tiny = make_tiny(architecture, dtype=torch.bfloat16, hidden_act=hidden_act)
    theirs = tiny.expected_logits(tokens)
    tiny.reference.float()
    exact = tiny.expected_logits(tokens)
    for chunk in some((45, 7, 1), 2):
        logits = paged_model(tiny.folder, kernels=kernels).in_chunks(tokens, chunk, TABLE)
        assert_as_close(logits, theirs, exact)
