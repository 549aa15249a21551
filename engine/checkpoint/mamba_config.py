"""The sizes of Mamba-2's layers, from a checkpoint's config.json; imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from checkpoint.json_keys import JsonKeys
from protocol.errors import ConfigError

_MAX_HEADS = 1 << 12
_MAX_SIZE = 1 << 12
_MAX_TAPS = 64
_INFINITY = {"__float__": "Infinity"}
"""Infinity, as transformers writes it."""


@dataclass(frozen=True)
class MambaConfig:
    """The heads of a layer, and the taps of its convolution. Each of `num_groups` groups serves
    `num_heads // num_groups` heads in turn. Steps are clamped to `step_limits`. `is_gguf`: the
    checkpoint is a GGUF file, which holds the rates of decay, which are negative, instead of the
    logarithms of their magnitudes.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    num_taps: int
    has_conv_bias: bool = True
    step_limits: tuple[float, float] = (0.0, math.inf)
    is_gguf: bool = False

    @property
    def inner(self) -> int:
        """Numbers that a token has over all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_sections(self) -> tuple[int, int, int]:
        """Numbers of a token that enter the convolution: those of all heads, b of all groups, and c
        of all groups."""
        of_groups = self.num_groups * self.state_size
        return self.inner, of_groups, of_groups

    @property
    def conv_width(self) -> int:
        """The sum of `conv_sections`."""
        return sum(self.conv_sections)

    @property
    def state_numbers(self) -> int:
        """Numbers that a layer keeps of a sequence: the recurrent state, and the last inputs of the
        convolution."""
        return self.inner * self.state_size + (self.num_taps - 1) * self.conv_width

    @property
    def state_parts(self) -> int:
        """Equal parts of a state: those of the groups."""
        return self.num_groups

    def sharded(self, size: int) -> MambaConfig:
        """The groups of one of `size` ranks, with their heads. Raises ConfigError."""
        if self.num_groups % size:
            raise ConfigError(f"n_groups {self.num_groups} cannot be split over {size} ranks")
        return replace(self, num_heads=self.num_heads // size, num_groups=self.num_groups // size)


def parse_mamba(keys: JsonKeys) -> MambaConfig:
    """The sizes by Nemotron-H's keys. Raises ModelLoadError."""
    for key in ("use_bias", "mamba_proj_bias"):
        if keys.flag(key, False):
            raise keys.wrong(key, "false or absent")
    if keys.text("mamba_hidden_act", "silu") != "silu":
        raise keys.wrong("mamba_hidden_act", "silu or absent")
    config = MambaConfig(
        keys.integer("mamba_num_heads", maximum=_MAX_HEADS),
        keys.integer("mamba_head_dim", maximum=_MAX_SIZE),
        keys.integer("n_groups", maximum=_MAX_HEADS),
        keys.integer("ssm_state_size", maximum=_MAX_SIZE),
        keys.integer("conv_kernel", minimum=2, maximum=_MAX_TAPS),
        keys.flag("use_conv_bias", True),
        _step_limits(keys),
        keys.flag("is_gguf", False),
    )
    if config.num_heads % config.num_groups:
        raise keys.wrong("n_groups", f"a divisor of mamba_num_heads ({config.num_heads})")
    return config


def _step_limits(keys: JsonKeys) -> tuple[float, float]:
    key = "time_step_limit"
    found = keys.raw(key, [0.0, math.inf])
    if not isinstance(found, list) or len(found) != 2:
        raise keys.wrong(key, "a list of two numbers")
    least, most = (math.inf if each == _INFINITY else each for each in found)
    if not all(type(each) in (int, float) for each in (least, most)) or not 0 <= least <= most:
        raise keys.wrong(key, "a list of two numbers, of which the first is not the larger one")
    return float(least), float(most)
