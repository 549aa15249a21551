"""Reads and checks a checkpoint's config.json; imports no torch.

Turns its keys into a `ModelConfig` (`engine.checkpoint.model_config`). Knows nothing of weights or
devices. Unsupported settings are rejected here, by name, before a weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from checkpoint.generation_config import load_generation_config
from checkpoint.json_keys import REQUIRED, JsonKeys, read_json_object
from checkpoint.regular_file import is_there
from engine.checkpoint.attention_config import parse_cap, parse_scoring, parse_windows
from engine.checkpoint.formats.quantization import parse_model_optimizer, parse_quantization
from engine.checkpoint.latent_config import parse_latent
from engine.checkpoint.layers_config import parse_layers
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.rope_config import RopeConfig, parse_ropes, rotated_part
from engine.models.architectures import ARCHITECTURES, MODEL_TYPES, TEXT_KINDS, Architecture
from protocol.errors import ModelLoadError
from protocol.layout import DTYPE_BYTES

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""The factors of the clamped activation."""
MAX_WIDTH = 1 << 22
"""The largest width of a layer or a vocabulary, in numbers; many times that of the largest
models."""

_MODEL_OPTIMIZER_FILE = "hf_quant_config.json"
_MISTRAL_FILE = "params.json"


def load_model_config(folder: Path) -> ModelConfig:
    """The checked configuration of the checkpoint in `folder`.

    End-of-text ids come from generation_config.json if it has any, else from config.json; this is
    the order of transformers' `generate`. Raises ModelLoadError.
    """
    path, beside = folder / "config.json", folder / _MODEL_OPTIMIZER_FILE
    if is_there(folder / _MISTRAL_FILE) and not is_there(path):
        raise ModelLoadError(
            f"{path} is missing; the folder has Mistral's own form ({_MISTRAL_FILE}), and only "
            "Hugging Face's is supported"
        )
    keys = JsonKeys(read_json_object(path), str(path))
    config = parse_model_config(keys, load_generation_config(folder).eos_token_ids)
    if config.quantization is not None or not is_there(beside):
        return config
    quantization = parse_model_optimizer(JsonKeys(read_json_object(beside), str(beside)))
    return replace(config, quantization=quantization)


def parse_model_config(keys: JsonKeys, generation_eos: tuple[int, ...] = ()) -> ModelConfig:
    """The checked configuration from the keys of a config.json. Raises ModelLoadError."""
    name, kind = _architecture(keys)
    keys = completed_keys(keys)
    vocab_size = _width(keys, "vocab_size")
    layers = parse_layers(keys, kind)
    num_layers = len(layers.kinds)
    max_positions = keys.integer("max_position_embeddings")
    rope, local_rope = parse_ropes(keys, max_positions, kind.has_local_rope, kind.rotates_part)
    if kind.layer_kinds.attention == "latent":
        num_heads, num_kv_heads = _width(keys, "num_attention_heads"), 1
        latent = parse_latent(keys, rope, num_heads)
        head_dim, rope_dim = latent.latent_dim, latent.qk_rope_head_dim
    else:
        num_heads, num_kv_heads, head_dim = _heads(keys, kind)
        latent, rope_dim = None, _rotary_dim(keys, kind, head_dim)
    hidden_size = _width(keys, "hidden_size")
    qkv_bias, o_bias, mlp_bias = _biases(keys, kind)
    if mlp_bias and layers.experts is not None:
        raise keys.wrong("mlp_bias", "false or absent (experts have no biases)")
    is_gguf = keys.flag("is_gguf", False)
    return ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_width(keys, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=keys.number(kind.eps_key),
        hidden_act=_hidden_act(keys, kind),
        rope=_checked_rope(keys, kind, rope, rope_dim),
        dtype=_dtype(keys),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=kind.qk_norm,
        layer_kinds=layers.kinds,
        sliding_windows=parse_windows(keys, kind, num_layers),
        eos_token_ids=_end_ids(keys, generation_eos, vocab_size),
        scoring=parse_scoring(keys, kind, head_dim),
        local_rope=local_rope,
        embedding_scale=math.sqrt(hidden_size) if kind.scales_embeddings else 1.0,
        has_sinks=kind.has_sinks,
        logits_cap=parse_cap(keys, kind, "final"),
        norm_offset=1.0 if kind.norms_from_zero and not is_gguf else 0.0,
        experts=layers.experts,
        latent=latent,
        delta=layers.delta,
        mamba=layers.mamba,
        state_layers=layers.keeps_state,
        stored_numbers=layers.stored_numbers,
        rotary_dim=None if rope_dim == head_dim else rope_dim,
        qk_rows_in_pairs=keys.flag("qk_rows_in_pairs", False),
        quantization=parse_quantization(keys),
    )


def _rotary_dim(keys: JsonKeys, kind: Architecture, head_dim: int) -> int:
    """Numbers of a head that are rotated."""
    if not kind.rotates_part:
        return head_dim
    rotary_dim = int(head_dim * rotated_part(keys))
    if rotary_dim < 2 or rotary_dim % 2:
        raise keys.wrong("partial_rotary_factor", "such that an even part of a head is rotated")
    return rotary_dim


def completed_keys(keys: JsonKeys) -> JsonKeys:
    """The keys of a config.json, completed by those that the file leaves out. Of a model with
    several parts, the keys of its language model. A null stands for itself, not for a default.
    Raises ModelLoadError for an architecture that is not supported."""
    _, kind = _architecture(keys)
    text = keys.table("text_config") if kind.has_text_config else None
    if text is None:
        return JsonKeys({**kind.defaults, **keys.values}, keys.where)
    whole = {key: value for key, value in keys.values.items() if value is not None}
    return JsonKeys({**kind.defaults, **text.values, **whole}, keys.where)


def _checked_rope(
    keys: JsonKeys, kind: Architecture, rope: RopeConfig, rope_dim: int
) -> RopeConfig:
    if not kind.scales_queries:
        rope = replace(rope, query_scaling_beta=None)
    if rope.kind == "divided" and len(rope.divisors) != rope_dim // 2:
        raise ModelLoadError(
            f"{keys.where}: the rope has {len(rope.divisors)} divisors; heads of {rope_dim} need "
            f"{rope_dim // 2}"
        )
    return rope


def _width(keys: JsonKeys, key: str) -> int:
    width: int = keys.integer(key, maximum=MAX_WIDTH)
    return width


def _end_ids(keys: JsonKeys, generation_eos: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    ids = generation_eos or keys.token_ids("eos_token_id")
    if any(each >= vocab_size for each in ids):
        raise ModelLoadError(
            f"{keys.where}: 'eos_token_id' (of generation_config.json, if that has one) must be "
            f"below vocab_size, {vocab_size}, not {max(ids)}"
        )
    return ids


def _architecture(keys: JsonKeys) -> tuple[str, Architecture]:
    names = keys.raw("architectures", None)
    if names is None:
        names = [_named_by_model_type(keys)]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise keys.wrong("architectures", "a list of one architecture")
    kind = ARCHITECTURES.get(names[0])
    if kind is None:
        raise ModelLoadError(
            f"{keys.where}: the architecture {names[0]!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    if names[0] in TEXT_KINDS:
        kind = _text_kind(keys, TEXT_KINDS[names[0]])
    if keys.raw("clip_qkv", None) is not None:
        raise keys.wrong("clip_qkv", "absent or null")
    if keys.raw("use_bidirectional_attention", None):
        raise keys.wrong("use_bidirectional_attention", "false or absent")
    return names[0], kind


def _text_kind(keys: JsonKeys, kinds: Mapping[str, Architecture]) -> Architecture:
    text = keys.table("text_config") or JsonKeys({}, keys.where)
    name = text.text("model_type", next(iter(kinds)))
    if name not in kinds:
        raise text.wrong("model_type", f"one of {', '.join(kinds)}")
    return kinds[name]


def _named_by_model_type(keys: JsonKeys) -> str:
    name: str | None = keys.text("model_type", None)
    if name not in MODEL_TYPES:
        raise ModelLoadError(
            f"{keys.where}: 'architectures' is missing, and 'model_type' is {name!r}; "
            f"supported are {', '.join(MODEL_TYPES)}"
        )
    return MODEL_TYPES[name]


def _biases(keys: JsonKeys, kind: Architecture) -> tuple[bool, bool, bool]:
    """Whether q, k and v, o, and the feed-forward layers have biases."""
    if not kind.configurable_biases:
        return kind.qkv_bias, False, False
    is_one_key = kind.o_bias_keys == kind.qkv_bias_keys
    return (
        _first_flag(keys, kind.qkv_bias_keys, kind.bias_default),
        _first_flag(keys, kind.o_bias_keys, kind.bias_default if is_one_key else False),
        _first_flag(keys, kind.mlp_bias_keys, False),
    )


def _first_flag(keys: JsonKeys, names: tuple[str, ...], default: bool) -> bool:
    """The flag under the first of these names that the file has, or `default`."""
    name = next((each for each in names if each in keys), None)
    return default if name is None else keys.flag(name, default)


def _heads(keys: JsonKeys, kind: Architecture) -> tuple[int, int, int]:
    """`(num_heads, num_kv_heads, head_dim)`."""
    num_heads = _width(keys, "num_attention_heads")
    num_kv_heads = keys.integer(
        "num_key_value_heads", num_heads if kind.multi_head_default else REQUIRED
    )
    if num_heads % num_kv_heads:
        raise keys.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    hidden_size = _width(keys, "hidden_size")
    key = next((each for each in kind.head_dim_keys if each in keys), "head_dim")
    if key not in keys and not kind.head_dim_required and hidden_size % num_heads:
        raise keys.wrong("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
    head_dim = keys.integer(
        key,
        REQUIRED if kind.head_dim_required else hidden_size // num_heads,
        minimum=2,
        maximum=MAX_WIDTH,
    )
    if num_heads * head_dim > MAX_WIDTH:
        raise keys.wrong(key, f"at most {MAX_WIDTH} with num_attention_heads ({num_heads})")
    if head_dim % 2:
        raise keys.wrong(key, "even")
    return num_heads, num_kv_heads, head_dim


def _hidden_act(keys: JsonKeys, kind: Architecture) -> str:
    if kind.activation:
        for key, known in _SWIGLU.items():
            if keys.number(key) != known:
                raise keys.wrong(key, f"{known:g} or absent")
        return kind.activation
    key = kind.activation_key
    name: str = keys.text(key, "silu")
    if name not in ACTIVATIONS:
        raise keys.wrong(key, f"one of {', '.join(ACTIVATIONS)}")
    return name


def _dtype(keys: JsonKeys) -> str:
    """The dtype under `dtype` (transformers 5) or `torch_dtype` (4); float32 if neither is set."""
    key = "dtype" if "dtype" in keys else "torch_dtype"
    name: str = keys.text(key, "float32")
    name = name.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise keys.wrong(key, f"one of {', '.join(DTYPE_BYTES)}")
    return name
