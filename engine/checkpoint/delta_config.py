"""The sizes of layers with a gated delta rule, and which layers are of that kind, from a
checkpoint's config.json; imports no torch.

`engine.models.architectures` says which architectures have such layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from checkpoint.json_keys import JsonKeys
from protocol.errors import ConfigError

MAX_HEADS = 1 << 12
MAX_HEAD_DIM = 1 << 12
MAX_TAPS = 64
_LINEAR, _FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class DeltaConfig:
    """The heads of a layer with a gated delta rule, and the taps of its convolution.

    Each key head serves `num_value_heads // num_key_heads` neighbouring value heads; with
    `keys_by_turns` (GGUF files of Qwen3.5), value head i has key head `i % num_key_heads`.
    `has_rates`: the checkpoint holds the rates of decay, which are negative, instead of the
    logarithms of their magnitudes.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int
    keys_by_turns: bool = False
    has_rates: bool = False

    @property
    def keys_width(self) -> int:
        """Numbers of all heads' keys of a token; of their queries, too."""
        return self.num_key_heads * self.key_dim

    @property
    def values_width(self) -> int:
        """Numbers of all heads' values of a token."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_sections(self) -> tuple[int, int, int]:
        """Numbers of a token that the convolution takes: queries, keys and values."""
        return self.keys_width, self.keys_width, self.values_width

    @property
    def conv_width(self) -> int:
        """The sum of `conv_sections`."""
        return sum(self.conv_sections)

    @property
    def recurrent_numbers(self) -> int:
        """Numbers of a layer's recurrent state."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def state_numbers(self) -> int:
        """Numbers that a layer keeps of a sequence: the recurrent state, and the last inputs of the
        convolution."""
        return self.recurrent_numbers + (self.num_taps - 1) * self.conv_width

    @property
    def state_parts(self) -> int:
        """Equal parts of a state: those of the key heads."""
        return self.num_key_heads

    @property
    def turns(self) -> int:
        """How often the key heads take turns in the order of value heads."""
        return self.num_value_heads // self.num_key_heads if self.keys_by_turns else 1

    def in_turns(self, count: int) -> tuple[int, ...]:
        """How many of `count` numbers, of all value heads together, each turn has."""
        return (count // self.turns,) * self.turns

    def sharded(self, size: int) -> DeltaConfig:
        """The heads of one of `size` ranks. Raises ConfigError."""
        if self.num_key_heads % size:
            raise ConfigError(
                f"linear_num_key_heads {self.num_key_heads} cannot be split over {size} ranks"
            )
        return replace(
            self,
            num_key_heads=self.num_key_heads // size,
            num_value_heads=self.num_value_heads // size,
        )


def parse_delta(keys: JsonKeys, num_layers: int) -> tuple[DeltaConfig | None, tuple[bool, ...]]:
    """The sizes, None if no layer is of this kind, and which layers are. Raises ModelLoadError."""
    is_linear = _linear_layers(keys, num_layers)
    if not any(is_linear):
        return None, is_linear
    config = DeltaConfig(
        keys.integer("linear_num_key_heads", maximum=MAX_HEADS),
        keys.integer("linear_num_value_heads", maximum=MAX_HEADS),
        keys.integer("linear_key_head_dim", maximum=MAX_HEAD_DIM),
        keys.integer("linear_value_head_dim", maximum=MAX_HEAD_DIM),
        keys.integer("linear_conv_kernel_dim", minimum=2, maximum=MAX_TAPS),
        keys.flag("keys_by_turns", False),
        keys.flag("is_gguf", False),
    )
    if config.num_value_heads % config.num_key_heads:
        expected = f"a multiple of linear_num_key_heads ({config.num_key_heads})"
        raise keys.wrong("linear_num_value_heads", expected)
    return config, is_linear


def _linear_layers(keys: JsonKeys, num_layers: int) -> tuple[bool, ...]:
    """Which layers have a gated delta rule: those that the file lists, or all except every n-th
    layer."""
    if "layer_types" not in keys:
        turn = keys.integer("full_attention_interval", 4)
        found = tuple((layer + 1) % turn != 0 for layer in range(num_layers))
    else:
        names = keys.raw("layer_types")
        if not isinstance(names, list) or len(names) != num_layers:
            raise keys.wrong("layer_types", f"a list of num_hidden_layers ({num_layers}) names")
        if any(name not in (_LINEAR, _FULL) for name in names):
            raise keys.wrong("layer_types", f"made of {_LINEAR!r} and {_FULL!r}")
        found = tuple(name == _LINEAR for name in names)
    if all(found):
        key = "layer_types" if "layer_types" in keys else "full_attention_interval"
        raise keys.wrong(key, f"such that one of {num_layers} layers has full attention")
    return found
