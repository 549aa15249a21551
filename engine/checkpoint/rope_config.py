"""Reads the rotary embedding's parameters from a checkpoint's config.json; imports no torch.

Accepts both formats in use: transformers 5 (`rope_parameters`, theta inside) and transformers 4
(`rope_theta` beside `rope_scaling`, whose kind is `rope_type` or `type`), and the kind `divided`
of GGUF files, which hold a divisor for each frequency. The arithmetic is in `engine.layers.rope`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkpoint.json_keys import MAX_NUMBER, JsonKeys
from protocol.errors import ModelLoadError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "telechat3-yarn", "divided")
DEFAULT_THETA = 10_000.0

_BY_LAYER_TYPE = {"full_attention", "sliding_attention"}
_LEAST_BETA = 1e-9
_JUST_BELOW_ZERO = -1e-9


@dataclass(frozen=True)
class RopeConfig:
    """A rotary embedding. The comments name the kinds that use a field.

    `max_position_embeddings` is the model's context length; `original_max_position_embeddings` is
    the context length it was trained with before scaling (equal if the checkpoint has no such key).
    """

    kind: str
    theta: float
    max_position_embeddings: int
    original_max_position_embeddings: int  # llama3, yarn
    factor: float = 1.0  # linear, dynamic, llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: derived from factor, mscale
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    query_scaling_beta: float | None = None  # Ministral 3: queries grow with their positions
    divisors: tuple[float, ...] = ()  # divided; one for each frequency


def parse_ropes(
    config: JsonKeys, max_position_embeddings: int, has_local: bool, rotates_part: bool = False
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding that the keys of a config.json describe, and the plain one of layers
    with windows, if these have their own (`has_local`). Raises ModelLoadError, also for heads that
    are not rotated whole unless `rotates_part`: see `rotated_part`."""
    if not has_local:
        return parse_rope(config, max_position_embeddings, rotates_part), None
    theta = config.number("rope_local_base_freq", DEFAULT_THETA, above=1.0)
    local_keys: Mapping[str, Any] = {}
    both = config.table("rope_parameters")
    if both is not None and _BY_LAYER_TYPE & both.values.keys():
        full, local = both.table("full_attention"), both.table("sliding_attention")
        local_keys = {"rope_parameters": {} if local is None else local.values}
        whole = {} if full is None else full.values
        config = JsonKeys({**config.values, "rope_parameters": whole}, config.where)
    local_config = JsonKeys({"rope_theta": theta, **local_keys}, config.where)
    return (
        parse_rope(config, max_position_embeddings),
        parse_rope(local_config, max_position_embeddings),
    )


def rotated_part(config: JsonKeys) -> float:
    """The part of each head that is rotated, its first numbers; at most 1. Raises
    ModelLoadError."""
    key = "partial_rotary_factor"
    table = config.table("rope_parameters")
    keys = table if table is not None and key in table else config
    part: float = keys.number(key, 1.0, maximum=1.0)
    return part


def parse_rope(
    config: JsonKeys, max_position_embeddings: int, rotates_part: bool = False
) -> RopeConfig:
    """The rotary embedding that the keys of a config.json describe, one for all layers.

    `telechat3-yarn` becomes `yarn`. Raises ModelLoadError for a kind that is not in `ROPE_KINDS`
    and for a missing or malformed key.
    """
    table = _rope_table(config)
    kind = table.text("rope_type", None) or table.text("type", "default")
    if kind not in ROPE_KINDS:
        raise ModelLoadError(
            f"{table.where}: rope type {kind!r} is not supported; "
            f"supported are {', '.join(ROPE_KINDS)}"
        )
    if not rotates_part:
        _refuse_partial_rotation(config, table)
    theta = table.number("rope_theta", None, above=1.0) or config.number(
        "rope_theta", DEFAULT_THETA, above=1.0
    )
    original = config.integer("original_max_position_embeddings", None) or table.integer(
        "original_max_position_embeddings", max_position_embeddings
    )
    rope = {
        "kind": kind,
        "theta": theta,
        "max_position_embeddings": max_position_embeddings,
        "original_max_position_embeddings": original,
        "query_scaling_beta": table.number("llama_4_scaling_beta", None),
    }
    if kind in ("linear", "dynamic", "llama3"):
        rope["factor"] = table.number("factor")
    if kind == "llama3":
        rope |= _llama3_fields(table)
    if kind == "divided":
        rope["divisors"] = _divisors(table)
    if kind == "yarn":
        rope |= _yarn_fields(table, max_position_embeddings / original)
    if kind == "telechat3-yarn":
        rope |= _telechat_fields(table, max_position_embeddings / original)
    return RopeConfig(**rope)


def _rope_table(config: JsonKeys) -> JsonKeys:
    # transformers 5 prefers an old `rope_scaling` to `rope_parameters` if both are present
    table = config.table("rope_scaling") or config.table("rope_parameters")
    if table is None:
        return JsonKeys({}, config.where)
    if table.values and all(isinstance(value, dict) for value in table.values.values()):
        raise ModelLoadError(
            f"{table.where}: a rotary embedding per layer type is not supported; "
            "supported is one for all layers"
        )
    return table


def _refuse_partial_rotation(config: JsonKeys, table: JsonKeys) -> None:
    for keys in (config, table):
        if keys.number("partial_rotary_factor", 1.0) != 1.0:
            raise keys.wrong("partial_rotary_factor", "1 (heads are rotated whole)")


def _llama3_fields(table: JsonKeys) -> dict[str, float]:
    low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
    if high <= low:
        raise table.wrong("high_freq_factor", f"greater than low_freq_factor ({low:g})")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _divisors(table: JsonKeys) -> tuple[float, ...]:
    found = table.raw("divisors")
    if not isinstance(found, list) or not all(_is_above_zero(each) for each in found):
        raise table.wrong("divisors", "a list of numbers greater than 0")
    return tuple(found)


def _is_above_zero(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < MAX_NUMBER  # type: ignore[operator]


def _yarn_fields(table: JsonKeys, length_ratio: float) -> dict[str, float | bool | None]:
    factor = table.number("factor", length_ratio)
    scale = table.number("attention_factor", None)
    if scale is None and "attn_factor" in table:  # on top of the scale that follows from the factor
        scale = table.number("attn_factor") * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return {
        "factor": factor,
        "attention_factor": scale,
        "beta_fast": table.number("beta_fast", 32.0, above=_LEAST_BETA),
        "beta_slow": table.number("beta_slow", 1.0, above=_LEAST_BETA),
        "mscale": table.number("mscale", None, above=_JUST_BELOW_ZERO) or None,
        "mscale_all_dim": table.number("mscale_all_dim", None, above=_JUST_BELOW_ZERO) or None,
        "truncate": table.flag("truncate", True),
    }


def _telechat_fields(table: JsonKeys, length_ratio: float) -> dict[str, float | bool | str | None]:
    """TeleChat3's YaRN, whose cos and sin grow less with the factor, as in vLLM's
    `TeleChat3RoPEScaledRotaryEmbedding`."""
    factor: float = table.number("factor", length_ratio)
    scale = 0.07 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return {
        **_yarn_fields(table, length_ratio),
        "kind": "yarn",
        "attention_factor": table.number("attention_factor", scale),
    }
