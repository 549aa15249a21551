"""Errors of a config.json name the key, its value and what is supported."""

from __future__ import annotations

from typing import Any

import pytest

from engine.checkpoint.rope_config import ROPE_KINDS
from engine.models.architectures import ARCHITECTURES, MODEL_TYPES
from protocol.errors import ModelLoadError
from tests.unit.engine.checkpoint.configs import BASE, FULL, LLAMA3, SLIDING, WITHOUT, parse, qwen

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
