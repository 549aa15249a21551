"""A GGUF file's metadata as the configuration that Hugging Face's config.json would hold.

Features that Baton does not compute are refused by name. Key names: the list of standardized keys
in the format's description (see `header`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from checkpoint.gguf import deepseek, hybrids, nemotron
from checkpoint.gguf.header import GgufTensor
from checkpoint.json_keys import MAX_INTEGER, JsonKeys
from checkpoint.regular_file import open_regular
from protocol.errors import ModelLoadError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    deepseek.NAME: "DeepseekV3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    **hybrids.ARCHITECTURES,
    **nemotron.ARCHITECTURES,
}
"""Maps names in `general.architecture` to our names. Mistral's models are called `llama` there,
too."""
PERMUTED = frozenset({"llama"})
"""Architectures whose files hold the rows of q and k in pairs within each head, not in halves."""

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that divides each rotary frequency, as Llama 3.1 scales them."""
_MIXTURES = {
    "llama": "MixtralForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
}
"""Architectures that may be mixtures of experts."""
_WITH_SHARED_EXPERT = ("qwen2moe", "qwen3next", "qwen35moe")
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""The numbers of layers of those Gemma models whose scores are divided by the root of hidden size
per head. Their files do not say so."""
_EMBED, _OUTPUT = "token_embd.weight", "output.weight"
_END_IDS = ("eos", "eot", "eom")
_END_NAMES = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})
"""Control tokens that end an answer, whether or not the metadata names them."""
_HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})
"""If a vocabulary has both, `<|end|>` ends only one of an answer's messages."""
_CONTROL = 3
_MAX_ROTARY = 1 << 16


def model_config(keys: JsonKeys, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """The content of config.json. Raises ModelLoadError, which names the file and the key."""
    name = keys.text("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{keys.where}: the architecture {name!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    if name == deepseek.NAME:
        return _common(keys, name, tensors) | _deepseek(keys, tensors)
    if name in nemotron.ARCHITECTURES:
        num_blocks = _num_layers(keys, name)
        return _common(keys, name, tensors) | nemotron.keys_of_blocks(
            keys, name, num_blocks, tensors
        )
    experts = _experts(keys, name)
    window = keys.integer(f"{name}.attention.sliding_window", None)
    num_heads, num_kv_heads, head_dim = _heads(keys, name)
    rope_dim = _rope_dim(keys, name, head_dim)
    ours = "MistralForCausalLM" if name == "llama" and window else ARCHITECTURES[name]
    config = {
        **_common(keys, name, tensors),
        "architectures": [_MIXTURES[name] if experts else ours],
        "intermediate_size": _inner(keys, name),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rope_parameters": _rope(keys, name, rope_dim, tensors),
        "sliding_window": window,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "qk_rows_in_pairs": name in PERMUTED,
        "is_gguf": True,
        **experts,
        **_gemma(keys, name),
        **hybrids.state_keys(keys, name, _num_layers(keys, name), rope_dim / head_dim, tensors),
    }
    if name in ("qwen2", "qwen3", "qwen2moe", "qwen3moe") and window:
        raise ModelLoadError(f"{keys.where}: a sliding window of {name} is not supported")
    return config


def _common(keys: JsonKeys, name: str, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """The keys that every architecture has."""
    return {
        "vocab_size": _rows(keys, tensors, _EMBED),
        "hidden_size": keys.integer(f"{name}.embedding_length"),
        "num_hidden_layers": _num_layers(keys, name),
        "max_position_embeddings": keys.integer(f"{name}.context_length"),
        "rms_norm_eps": keys.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": _OUTPUT not in tensors,
        "dtype": _dtype(tensors),
        "eos_token_id": end_ids(keys),
    }


def _num_layers(keys: JsonKeys, name: str) -> int:
    """The number of layers, without those at the end that predict further tokens ahead."""
    number: int = keys.integer(f"{name}.block_count")
    ahead: int = keys.integer(f"{name}.nextn_predict_layers", 0, minimum=0)
    if ahead >= number:
        raise keys.wrong(f"{name}.nextn_predict_layers", f"below the number of blocks, {number}")
    return number - ahead


def _inner(keys: JsonKeys, name: str) -> int:
    """The size of dense feed-forward layers. A mixture's file may leave it out if the model has no
    dense layers."""
    key = f"{name}.feed_forward_length"
    is_left_out = key not in keys and name in _WITH_SHARED_EXPERT
    return _uniform(keys, f"{name}.expert_feed_forward_length" if is_left_out else key)


def _deepseek(keys: JsonKeys, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    attention = deepseek.attention_keys(keys, tensors)
    rope = _rope(keys, deepseek.NAME, attention["qk_rope_head_dim"], tensors)
    if rope["rope_type"] == "yarn":
        rope |= deepseek.yarn_keys(keys)
    num_layers = _num_layers(keys, deepseek.NAME)
    return {
        "architectures": [deepseek.architecture(keys, tensors)],
        "intermediate_size": _inner(keys, deepseek.NAME),
        "num_attention_heads": _uniform(keys, f"{deepseek.NAME}.attention.head_count"),
        "rope_parameters": rope,
        **attention,
        **deepseek.expert_keys(keys, num_layers, tensors),
    }


def _gemma(keys: JsonKeys, name: str) -> dict[str, Any]:
    """The keys that only Gemma has; none for another architecture."""
    if name not in _LAYERS_OF_27B:
        return {}
    found: dict[str, Any] = {
        "rope_local_base_freq": keys.number(f"{name}.rope.freq_base_swa", 10_000.0, above=1),
    }
    if keys.integer(f"{name}.block_count") == _LAYERS_OF_27B[name]:
        num_heads = _uniform(keys, f"{name}.attention.head_count")
        found["query_pre_attn_scalar"] = keys.integer(f"{name}.embedding_length") / num_heads
    else:
        found["query_pre_attn_scalar"] = _heads(keys, name)[2]
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if f"{name}.{cap}" in keys:
            found[cap] = keys.number(f"{name}.{cap}")
    return found


def _experts(keys: JsonKeys, name: str) -> dict[str, Any]:
    """The keys of a mixture of experts; empty for a dense model. llama.cpp normalizes the experts'
    weights, except in Qwen2-MoE."""
    count = keys.integer(f"{name}.expert_count", 0, minimum=0)
    if not count:
        return {}
    if name not in _MIXTURES or keys.integer(f"{name}.expert_shared_count", 0, minimum=0):
        raise ModelLoadError(f"{keys.where}: mixtures of experts of this kind are not supported")
    if keys.number(f"{name}.expert_weights_scale", 1.0) != 1.0:
        raise keys.wrong(f"{name}.expert_weights_scale", "1 or absent")
    inner = _inner(keys, name)
    shared = {}
    if name in _WITH_SHARED_EXPERT:
        size = keys.integer(f"{name}.expert_shared_feed_forward_length", inner)
        shared["shared_expert_intermediate_size"] = size
    return {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": keys.integer(f"{name}.expert_used_count"),
        **dict.fromkeys(
            ("moe_intermediate_size",) + ("intermediate_size",) * (name == "gpt-oss"),
            keys.integer(f"{name}.expert_feed_forward_length", inner),
        ),
        "norm_topk_prob": name != "qwen2moe",
        **shared,
    }


def end_ids(keys: JsonKeys) -> list[int]:
    """The ids of all tokens that end an answer, sorted."""
    found = {token_id for kind in _END_IDS if (token_id := special_id(keys, kind)) is not None}
    tokens = keys.raw("tokenizer.ggml.tokens", [])
    types = keys.raw("tokenizer.ggml.token_type", [])
    if isinstance(tokens, list) and isinstance(types, list):
        is_harmony = all(each in tokens for each in _HARMONY_ENDS)
        ends = _HARMONY_ENDS if is_harmony else _END_NAMES
        if is_harmony and "<|end|>" in tokens:
            found.discard(tokens.index("<|end|>"))
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
            if kind == _CONTROL and token in ends:
                found.add(token_id)
    return sorted(found)


def special_id(keys: JsonKeys, kind: str) -> int | None:
    """The id of a special token such as `bos`; None if it is absent, for which llama.cpp
    writes 2**32 - 1."""
    key = f"tokenizer.ggml.{kind}_token_id"
    number: int | None = keys.integer(key, None, minimum=0, maximum=2**32 - 1)
    return None if number is None or number > MAX_INTEGER else number


def _heads(keys: JsonKeys, name: str) -> tuple[int, int, int]:
    num_heads = _uniform(keys, f"{name}.attention.head_count")
    num_kv_heads = (
        _uniform(keys, f"{name}.attention.head_count_kv")
        if f"{name}.attention.head_count_kv" in keys
        else num_heads
    )
    hidden = keys.integer(f"{name}.embedding_length")
    head_dim = keys.integer(f"{name}.attention.key_length", max(hidden // num_heads, 1))
    if keys.integer(f"{name}.attention.value_length", head_dim) != head_dim:
        raise keys.wrong(f"{name}.attention.value_length", f"the length of keys, {head_dim}")
    return num_heads, num_kv_heads, head_dim


def _rope_dim(keys: JsonKeys, name: str, head_dim: int) -> int:
    """How many numbers of a head are rotated: all of them, except in hybrids."""
    count: int = keys.integer(f"{name}.rope.dimension_count", head_dim)
    if count != head_dim and (name not in hybrids.ARCHITECTURES or count > head_dim):
        raise keys.wrong(
            f"{name}.rope.dimension_count", f"the length of heads, {head_dim} (they rotate whole)"
        )
    return count


def _uniform(keys: JsonKeys, key: str) -> int:
    """The number that holds for all layers; some files repeat it for each layer."""
    value = keys.raw(key)
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        keys = JsonKeys({key: value[0]}, keys.where)
    number: int = keys.integer(key)
    return number


def _rows(keys: JsonKeys, tensors: Mapping[str, GgufTensor], name: str) -> int:
    if name not in tensors:
        raise ModelLoadError(f"{keys.where}: the tensor {name!r} is missing")
    return tensors[name].shape[0]


def _rope(
    keys: JsonKeys, name: str, head_dim: int, tensors: Mapping[str, GgufTensor]
) -> dict[str, Any]:
    table: dict[str, Any] = {"rope_theta": keys.number(f"{name}.rope.freq_base", 10_000.0, above=1)}
    if ROPE_FACTORS in tensors:
        return table | {
            "rope_type": "divided",
            "divisors": _divisors(keys, tensors[ROPE_FACTORS], head_dim),
        }
    factor = keys.number(f"{name}.rope.scaling.factor", None) or keys.number(
        f"{name}.rope.scale_linear", None
    )
    kind = keys.text(f"{name}.rope.scaling.type", "none" if factor is None else "linear")
    if kind not in ("none", "linear", "yarn"):
        raise keys.wrong(f"{name}.rope.scaling.type", "none, linear or yarn")
    if kind == "none" or factor is None:
        return table | {"rope_type": "default"}
    table |= {"rope_type": kind, "factor": factor, "truncate": name != "gpt-oss"}
    return table if kind == "linear" else table | _yarn(keys, name, factor)


def _yarn(keys: JsonKeys, name: str, factor: float) -> dict[str, Any]:
    prefix = f"{name}.rope.scaling"
    found = {
        "original_max_position_embeddings": keys.integer(f"{prefix}.original_context_length"),
        "beta_fast": keys.number(f"{prefix}.yarn_beta_fast", 32.0),
        "beta_slow": keys.number(f"{prefix}.yarn_beta_slow", 1.0),
    }
    scale = keys.number(f"{prefix}.attn_factor", None)
    if scale is not None:  # on top of the scale that follows from the factor
        found["attention_factor"] = scale * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return found


def _divisors(keys: JsonKeys, tensor: GgufTensor, head_dim: int) -> list[float]:
    count = head_dim // 2
    if tensor.type.name != "F32" or tensor.shape != (count,) or count > _MAX_ROTARY:
        raise ModelLoadError(
            f"{tensor.file}: tensor {tensor.name!r} must be {count} numbers of F32"
        )
    with open_regular(tensor.file) as stream:
        stream.seek(tensor.begin)
        content = stream.read(tensor.end - tensor.begin)
    if len(content) < 4 * count:
        raise ModelLoadError(f"{tensor.file}: the file is cut short in {tensor.name!r}")
    found = list(struct.unpack(f"<{count}f", content))
    if not all(math.isfinite(each) and each > 0 for each in found):
        raise ModelLoadError(f"{tensor.file}: tensor {tensor.name!r} must be numbers above 0")
    return found


def _dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """The dtype to compute in: the dtype of the matrices if all are plain, else bfloat16."""
    kinds = {each.type.name for each in tensors.values() if len(each.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    if "F16" in kinds and kinds <= {"F16", "F32"}:
        return "float16"
    return "bfloat16"
