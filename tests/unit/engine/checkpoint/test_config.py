"""Reading config.json and generation_config.json in both of transformers' spellings."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from checkpoint.generation_config import GenerationConfig, load_generation_config
from checkpoint.json_keys import JsonKeys
from engine.checkpoint.config import load_model_config, parse_model_config
from engine.checkpoint.rope_config import ROPE_KINDS, RopeConfig
from engine.models.architectures import ARCHITECTURES, MODEL_TYPES
from protocol.errors import ModelLoadError
from protocol.layout import KvLayout

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
"""Of mixtures."""
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MAMBA = {
    "hybrid_override_pattern": "M-*-",
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 4,
}
WITHOUT = "(left out)"


def parse(**changes: Any):
    values = {key: value for key, value in (BASE | changes).items() if value is not WITHOUT}
    return parse_model_config(JsonKeys(values, "config.json"))


def qwen(name: str = "Qwen2", **changes: Any):
    return parse(architectures=[f"{name}ForCausalLM"], head_dim=8, **changes)


def test_the_plain_keys():
    config = parse(eos_token_id=[7, 8], tie_word_embeddings=True)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (1000, 64, 128)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (4, 8, 2)
    assert (config.head_dim, config.max_position_embeddings) == (8, 2048)
    assert (config.rms_norm_eps, config.hidden_act, config.dtype) == (1e-5, "silu", "float32")
    assert config.eos_token_ids == (7, 8)
    assert config.tie_word_embeddings
    assert config.sliding_windows == (None,) * 4
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False)
    assert config.qk_norm is False
    assert config.rope == RopeConfig("default", 10_000.0, 2048, 2048)


@pytest.mark.parametrize(
    ("name", "changes", "biases"),
    [
        ("SeedOss", {}, (True, False, False)),
        ("SeedOss", {"attention_bias": False, "attention_out_bias": True}, (False, True, False)),
        ("SeedOss", {"mlp_bias": True}, (True, False, True)),
        ("InternLM3", {}, (False, False, False)),
        ("InternLM3", {"qkv_bias": True}, (True, False, False)),
        ("InternLM3", {"qkv_bias": False, "bias": True}, (False, True, True)),
        ("InternLM3", {"bias": False, "mlp_bias": True}, (False, False, False)),
        ("InternLM3", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("TeleChat3", {"attention_bias": True}, (True, True, False)),
        ("MiMo", {"attention_bias": False}, (True, False, False)),
        ("Ministral3", {"attention_bias": True}, (False, False, False)),
    ],
)
def test_each_architecture_has_keys_of_its_own_for_biases(name, changes, biases):
    config = qwen(name, **changes)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases


def test_only_architectures_that_do_scale_their_queries():
    scaled = {"rope_parameters": {"rope_theta": 5.0, "llama_4_scaling_beta": 0.1}}
    assert qwen("Ministral3", **scaled).rope.query_scaling_beta == 0.1
    assert qwen("Mistral", **scaled).rope.query_scaling_beta is None
    assert qwen("Ministral3").sliding_windows == (None,) * 4
    assert qwen("Ministral3", sliding_window=9).sliding_windows == (9,) * 4


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_without_architectures_the_model_type_tells(model_type):
    config = parse(
        architectures=WITHOUT, model_type=model_type, head_dim=8, **EXPERTS, **LATENT, **MAMBA
    )
    assert config.architecture == MODEL_TYPES[model_type]


def test_every_architecture_but_other_spellings_has_a_model_type():
    spellings = {"LLaMAForCausalLM", "TeleChat3ForCausalLM"}
    assert set(MODEL_TYPES.values()) == ARCHITECTURES.keys() - spellings


TELECHAT_3: dict[str, Any] = {
    "architectures": ["Telechat3ForCausalLM"],
    "model_type": "telechat3",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 64,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "telechat3-yarn",
        "type": "telechat3-yarn",
    },
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    "spelling", [{}, {"architectures": ["TeleChat3ForCausalLM"]}, {"architectures": None}]
)
def test_the_config_of_telechat3_36b(spelling):
    config = parse_model_config(JsonKeys(TELECHAT_3 | spelling, "config.json"))
    assert config.architecture.lower() == "telechat3forcausallm"
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (64, 48, 8)
    assert config.rope == RopeConfig(
        "yarn", 1e6, 32768, 8192, factor=4.0, attention_factor=1.0 + 0.07 * math.log(4.0)
    )


def test_head_dim_explicit_or_derived():
    assert parse(head_dim=24).head_dim == 24
    assert parse(head_dim=None).head_dim == 8


def test_old_llamas_have_as_many_kv_heads_as_heads():
    assert parse(num_key_value_heads=WITHOUT).num_kv_heads == 8


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
    ],
)
def test_dtype_in_both_spellings(changes, expected):
    assert parse(**changes).dtype == expected


def test_families_differ_in_biases_and_norms():
    def traits(config):
        return (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm)

    assert traits(parse(attention_bias=True)) == (True, True, False, False)
    assert traits(parse(mlp_bias=True)) == (False, False, True, False)
    both = {"attention_bias": True, "mlp_bias": True}
    assert traits(parse(architectures=["MistralForCausalLM"], **both)) == (False,) * 4
    assert traits(qwen("Qwen2")) == (True, False, False, False)
    assert traits(qwen("Qwen2", attention_bias=False)) == (True, False, False, False)
    assert traits(qwen("Qwen3")) == (False, False, False, True)
    assert traits(qwen("Qwen3", **both)) == (True, True, False, True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 100}, (100,) * 4),
        ({"sliding_window": None}, (None,) * 4),
        ({}, (4096,) * 4),
    ],
)
def test_mistrals_window_holds_for_every_layer(changes, expected):
    assert parse(architectures=["MistralForCausalLM"], **changes).sliding_windows == expected


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 100, "max_window_layers": 0}, (None,) * 4),
        ({"use_sliding_window": True}, (None,) * 4),  # max_window_layers is 28 by default
        (
            {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1},
            (None, 100, 100, 100),
        ),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": [SLIDING, FULL, FULL, SLIDING],
            },
            (9, None, None, 9),
        ),
        ({"layer_types": [FULL] * 4, "sliding_window": 9}, (None,) * 4),
    ],
)
def test_qwens_windows_are_per_layer(name, changes, expected):
    assert qwen(name, **changes).sliding_windows == expected


def test_llama_has_no_window():
    assert parse(sliding_window=5).sliding_windows == (None,) * 4
    unused = {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}
    assert qwen("IQuestCoder", **unused).sliding_windows == (None,) * 4


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"kind": "default"}, {"kind": "default"}),
        ({"kind": "linear", "factor": 2}, {"kind": "linear", "factor": 2.0}),
        ({"kind": "dynamic", "factor": 2.5}, {"kind": "dynamic", "factor": 2.5}),
        (
            {"kind": "llama3", **LLAMA3, "original_max_position_embeddings": 512},
            {"kind": "llama3", **LLAMA3, "original_max_position_embeddings": 512},
        ),
        ({"kind": "yarn", "factor": 4.0}, {"kind": "yarn", "factor": 4.0}),
        (
            {"kind": "yarn", "original_max_position_embeddings": 512},
            {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
        (
            {
                "kind": "yarn",
                "factor": 4.0,
                "attention_factor": 1.2,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.7,
                "mscale_all_dim": 0.0,
                "truncate": False,
            },
            {
                "kind": "yarn",
                "factor": 4.0,
                "attention_factor": 1.2,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "truncate": False,
            },
        ),
        (
            {"kind": "telechat3-yarn", "factor": 8, "attention_factor": 1.2, "beta_fast": 16},
            {"kind": "yarn", "factor": 8.0, "attention_factor": 1.2, "beta_fast": 16.0},
        ),
        ({"kind": "telechat3-yarn"}, {"kind": "yarn", "attention_factor": 1.0}),
        (
            {"kind": "yarn", "factor": 4.0, "attn_factor": 0.5},
            {"kind": "yarn", "factor": 4.0, "attention_factor": 0.5 * (1 + 0.1 * math.log(4.0))},
        ),
        (
            {"kind": "yarn", "factor": 4.0, "attn_factor": 0.5, "attention_factor": 1.2},
            {"kind": "yarn", "factor": 4.0, "attention_factor": 1.2},
        ),
    ],
    ids=str,
)
def test_rope_in_both_spellings(kind_key, spelling, table, expected):
    table = {kind_key if key == "kind" else key: value for key, value in table.items()}
    if spelling == "rope_scaling":
        config = parse(rope_scaling=table, rope_theta=5000)
    else:
        config = parse(rope_parameters={"rope_theta": 5000.0, **table})
    defaults = {
        "theta": 5000.0,
        "max_position_embeddings": 2048,
        "original_max_position_embeddings": 2048,
    }
    assert config.rope == RopeConfig(**(defaults | expected))


def test_files_that_carry_both_spellings():
    config = parse(
        rope_theta=5000,
        rope_scaling=None,
        rope_parameters={"rope_type": "default", "rope_theta": 5000},
    )
    assert config.rope == RopeConfig("default", 5000.0, 2048, 2048)


def test_the_original_context_may_stand_beside_the_table():
    table = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 7}
    rope = parse(rope_scaling=table, original_max_position_embeddings=99).rope
    assert rope.original_max_position_embeddings == 99


ERRORS: list[tuple[dict[str, Any], list[str]]] = [
    *[
        ({key: WITHOUT}, [f"'{key}'", "missing"])
        for key in sorted(BASE.keys() - {"num_key_value_heads"})
    ],
    ({"architectures": ["GPT2LMHeadModel"]}, ["'GPT2LMHeadModel'", *ARCHITECTURES]),
    ({"architectures": []}, ["'architectures'", "[]"]),
    ({"architectures": WITHOUT}, ["'architectures' is missing", "None", *MODEL_TYPES]),
    ({"architectures": WITHOUT, "model_type": "gpt2"}, ["'gpt2'", *MODEL_TYPES]),
    ({"clip_qkv": 8.0}, ["'clip_qkv'"]),
    (
        {"architectures": ["IQuestCoderForCausalLM"], "use_sliding_window": True},
        ["'use_sliding_window'", "false or absent", "true"],
    ),
    ({"architectures": "LlamaForCausalLM"}, ["'architectures'"]),
    ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": WITHOUT}, ["num_key_value"]),
    ({"architectures": ["Qwen3ForCausalLM"]}, ["'head_dim'", "missing"]),
    ({"num_hidden_layers": 0}, ["'num_hidden_layers'", "at least 1", "0"]),
    ({"vocab_size": "many"}, ["'vocab_size'", '"many"']),
    ({"hidden_size": True}, ["'hidden_size'", "true"]),
    ({"hidden_size": 60.5}, ["'hidden_size'", "60.5"]),
    ({"hidden_size": 60}, ["'hidden_size'", "num_attention_heads (8)", "60"]),
    ({"num_key_value_heads": 3}, ["'num_key_value_heads'", "(8)", "3"]),
    ({"head_dim": 7}, ["'head_dim'", "even", "7"]),
    ({"rms_norm_eps": -1}, ["'rms_norm_eps'", "-1"]),
    ({"rms_norm_eps": float("nan")}, ["'rms_norm_eps'", "NaN"]),
    ({"hidden_act": "relu6"}, ["'hidden_act'", "silu", "gelu", '"relu6"']),
    ({"dtype": "float8_e4m3fn"}, ["'dtype'", "bfloat16", "float8_e4m3fn"]),
    ({"torch_dtype": 16}, ["'torch_dtype'", "16"]),
    ({"tie_word_embeddings": "yes"}, ["'tie_word_embeddings'", "true or false"]),
    ({"eos_token_id": [1, "x"]}, ["'eos_token_id'"]),
    ({"eos_token_id": -1}, ["'eos_token_id'", "-1"]),
    ({"quantization_config": {"bits": 4}}, ["quantization_config", "'quant_method'"]),
    ({"rope_theta": 0}, ["'rope_theta'", "0"]),
    ({"rope_scaling": "yarn"}, ["'rope_scaling'", "an object"]),
    ({"rope_scaling": {"rope_type": "longrope"}}, ["'longrope'", *ROPE_KINDS]),
    ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "'factor'", "missing"]),
    ({"rope_scaling": {"type": "dynamic", "factor": "2"}}, ["'factor'", '"2"']),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["'low_freq_factor'"]),
    (
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
        ["'high_freq_factor'", "low_freq_factor"],
    ),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["per layer type"]),
    ({"partial_rotary_factor": 0.5}, ["'partial_rotary_factor'", "0.5"]),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        ["'partial_rotary_factor'", "0.25"],
    ),
]


@pytest.mark.parametrize(("changes", "words"), ERRORS, ids=[str(e[0])[:60] for e in ERRORS])
def test_errors_name_the_key_and_what_is_supported(changes, words):
    with pytest.raises(ModelLoadError) as raised:
        parse(**changes)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith("config.json")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": [FULL] * 3}, ["'layer_types'", "(4)"]),
        ({"layer_types": ["chunked_attention"] * 4}, ["'layer_types'", SLIDING]),
        ({"layer_types": [SLIDING] * 4}, ["'layer_types'", "use_sliding_window"]),
        ({"use_sliding_window": True, "sliding_window": 0}, ["'sliding_window'", "0"]),
    ],
    ids=str,
)
def test_errors_of_windows(changes, words):
    with pytest.raises(ModelLoadError) as raised:
        qwen("Qwen2", **changes)
    for word in words:
        assert word in str(raised.value)


def write(folder, name: str, value: Any) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    (folder / name).write_text(text, encoding="utf-8")


def test_end_of_text_ids_are_the_generation_configs_where_it_has_any(tmp_path):
    write(tmp_path, "config.json", BASE | {"eos_token_id": 3})
    assert load_model_config(tmp_path).eos_token_ids == (3,)
    write(tmp_path, "generation_config.json", {"temperature": 0.6})
    assert load_model_config(tmp_path).eos_token_ids == (3,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [5, 6]})
    assert load_model_config(tmp_path).eos_token_ids == (5, 6)


def test_mistral_s_own_form_is_named(tmp_path):
    write(tmp_path, "params.json", {"dim": 4096})
    expected = r"config\.json is missing; the folder has Mistral's own form \(params\.json\)"
    with pytest.raises(ModelLoadError, match=expected):
        load_model_config(tmp_path)


def test_generation_config(tmp_path):
    assert load_generation_config(tmp_path) == GenerationConfig()
    values = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "transformers_version": "4.51.0",
    }
    write(tmp_path, "generation_config.json", values)
    assert load_generation_config(tmp_path) == GenerationConfig(
        eos_token_ids=(),
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.0,
        repetition_penalty=1.05,
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"temperature": "hot"}, ["'temperature'", '"hot"']),
        ({"top_k": 1.5}, ["'top_k'", "1.5"]),
        ({"do_sample": 1}, ["'do_sample'", "1"]),
        ("[1, 2]", ["JSON object", "[1, 2]"]),
        ("{", ["not valid JSON"]),
    ],
)
def test_errors_of_the_generation_config(tmp_path, value, words):
    write(tmp_path, "generation_config.json", value)
    with pytest.raises(ModelLoadError) as raised:
        load_generation_config(tmp_path)
    for word in [*words, "generation_config.json"]:
        assert word in str(raised.value)


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_the_kv_layout():
    assert parse().kv_layout("f" * 32, 16, "bfloat16") == KvLayout(
        model_fingerprint="f" * 32,
        dtype="bfloat16",
        num_layers=4,
        num_kv_heads=2,
        block_size=16,
        head_dim=8,
    )


@pytest.mark.parametrize("module", ["engine.checkpoint.config", "engine.checkpoint.files"])
def test_no_torch_is_imported(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
