"""The settings of attention: windows, and how scores are scaled and capped; imports no torch.

`engine.models.architectures` says which keys of a config.json an architecture has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from checkpoint.json_keys import JsonKeys
from engine.models.architectures import Architecture

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Scoring:
    """How the product of a query and a key becomes a score. The product is multiplied by `scale`.
    If there is a `cap`, the score then becomes `cap * tanh(score / cap)`."""

    scale: float
    cap: float | None = None


def parse_scoring(keys: JsonKeys, kind: Architecture, head_dim: int) -> Scoring:
    """The scoring of all layers. Raises ModelLoadError."""
    divisor = keys.number("query_pre_attn_scalar", head_dim) if kind.has_query_scalar else head_dim
    return Scoring(1 / math.sqrt(divisor), parse_cap(keys, kind, "attn"))


def parse_cap(keys: JsonKeys, kind: Architecture, name: str) -> float | None:
    """The cap of logits, `attn` or `final`; None if they have none. Raises ModelLoadError for a cap
    that the architecture's models do not have."""
    key = f"{name}_logit_softcapping"
    if name not in kind.caps and kind.caps and key in keys:
        raise keys.wrong(key, "absent or null")
    cap: float | None = keys.number(key, None) if name in kind.caps else None
    return cap


def parse_windows(keys: JsonKeys, kind: Architecture, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window in tokens, itself included; None if it attends to all earlier tokens.
    Raises ModelLoadError."""
    if kind.windows == "uniform":
        # In transformers' Mistral an absent key means 4096; null means no window.
        default = None if "sliding_window" in keys.values else kind.default_window
        window = keys.integer("sliding_window", default)
        return (window,) * num_layers
    if kind.windows == "none":
        return (None,) * num_layers
    is_windowed = keys.flag("use_sliding_window", False)
    if kind.windows == "refused":
        if is_windowed:
            raise keys.wrong("use_sliding_window", "false or absent")
        return (None,) * num_layers
    if kind.windows == "layers":
        window = keys.integer("sliding_window", 4096) if is_windowed else None
    else:
        window = keys.integer("sliding_window", None)
    if "layer_types" in keys:
        return _listed_windows(keys, kind, num_layers, window)
    if kind.windows == "by turns":
        turn = keys.integer("sliding_window_pattern", kind.window_turn)
        return tuple(window if (layer + 1) % turn else None for layer in range(num_layers))
    first = keys.integer("max_window_layers", kind.default_full_layers, minimum=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _listed_windows(
    keys: JsonKeys, kind: Architecture, num_layers: int, window: int | None
) -> tuple[int | None, ...]:
    layer_types = keys.raw("layer_types")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise keys.wrong("layer_types", f"a list of num_hidden_layers ({num_layers}) names")
    for name in layer_types:
        if name not in (_FULL, _SLIDING):
            raise keys.wrong("layer_types", f"made of {_FULL!r} and {_SLIDING!r}")
    if _SLIDING in layer_types and window is None:
        switch = "use_sliding_window" if kind.windows == "layers" else "sliding_window"
        raise keys.wrong("layer_types", f"all {_FULL!r} while {switch!r} is not set")
    return tuple(window if name == _SLIDING else None for name in layer_types)
