"""Reading config.json in both of transformers' spellings."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from checkpoint.json_keys import JsonKeys
from engine.checkpoint.config import load_model_config, parse_model_config
from engine.checkpoint.rope_config import RopeConfig
from engine.models.architectures import ARCHITECTURES, MODEL_TYPES
from protocol.errors import ModelLoadError
from protocol.layout import KvLayout
from tests.unit.engine.checkpoint.configs import (
    BASE,
    EXPERTS,
    FULL,
    LATENT,
    MAMBA,
    SLIDING,
    WITHOUT,
    parse,
    qwen,
    write,
)


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
