"""Reads and checks a checkpoint's config.json; imports no torch.

Turns its keys into a `ModelConfig`, which configures the decoder for every architecture. Knows
nothing of weights or devices. Unsupported settings are rejected here, by name, before a weight is
read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint.generation_config import load_generation_config
from checkpoint.json_keys import REQUIRED, JsonKeys, read_json_object
from checkpoint.regular_file import is_there
from engine.checkpoint.attention_config import Scoring, parse_cap, parse_scoring, parse_windows
from engine.checkpoint.delta_config import DeltaConfig
from engine.checkpoint.experts_config import ExpertsConfig
from engine.checkpoint.formats.quantization import (
    Quantization,
    parse_model_optimizer,
    parse_quantization,
)
from engine.checkpoint.latent_config import LatentConfig, parse_latent
from engine.checkpoint.layers_config import parse_layers
from engine.checkpoint.mamba_config import MambaConfig
from engine.checkpoint.rope_config import RopeConfig, parse_ropes, rotated_part
from engine.checkpoint.shard import Shard
from engine.models.architectures import ARCHITECTURES, MODEL_TYPES, Architecture, LayerKinds
from protocol.errors import ConfigError, ModelLoadError
from protocol.layout import (
    DTYPE_BYTES,
    KEYS_AND_VALUES,
    KvGroup,
    KvLayout,
    group_layers,
    group_states,
    stage_layers,
)

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""What the clamped activation is made of."""
MAX_WIDTH = 1 << 22
"""Of a layer or a vocabulary, in numbers; many times that of the largest models."""

_MODEL_OPTIMIZER_FILE = "hf_quant_config.json"


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    `layer_kinds[i]` is what layer i is made of. `sliding_windows[i]` is its window in tokens, the
    token itself included, or None if it attends to all earlier tokens. `dtype` is the checkpoint's
    dtype. `num_kv_heads` and `head_dim` are those of the KV pool: with `latent` attention there is
    one head, whose rows are latents.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope: RopeConfig
    dtype: str
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_kinds: tuple[LayerKinds, ...]
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    scoring: Scoring
    local_rope: RopeConfig | None = None
    """The rotary embedding of layers with windows; None: all layers use `rope`."""
    embedding_scale: float = 1.0
    has_sinks: bool = False
    """Whether each head has a logit that takes part in its softmax, without a value."""
    logits_cap: float | None = None
    """If set, logits become `cap * tanh(logits / cap)`."""
    norm_offset: float = 0.0
    """Added to the norms' weights that the files hold."""
    experts: ExpertsConfig | None = None
    """Sizes of the layers that are mixtures of experts; None if none is."""
    latent: LatentConfig | None = None
    """Sizes of latent attention; None for attention of grouped queries."""
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    """Sizes of the layers that keep a state (`state_layers`), by their kind; None if none does."""
    state_layers: tuple[bool, ...] = ()
    stored_numbers: tuple[tuple[int, int], ...] = ()
    """By layer, the numbers of its attention and of its feed-forward half in the checkpoint."""
    rotary_dim: int | None = None
    """Numbers of a head that are rotated, the first ones; None: all."""
    qk_rows_in_pairs: bool = False
    """Whether the files hold the rows of a head of q and k in the order of rotated pairs, not of
    halves; GGUF files of llama do."""
    quantization: Quantization | None = None
    """How weights in safetensors may be quantized; None if they are not."""
    first_layer: int = 0
    """The number of the first of these layers in the checkpoint: of later stages not 0."""
    gives_logits: bool = True
    """Whether these are the last layers."""
    vocab_share: tuple[int, int] = (0, 1)
    """Which of how many parts of the vocabulary has its rows of embedding and logits here."""

    def kv_layout(self, model_fingerprint: str, block_size: int, dtype: str) -> KvLayout:
        """The layout of this model's KV blocks, unsharded; `dtype` as in `KV_DTYPE_BYTES`. Layers
        that keep a state are a group of their own."""
        return KvLayout(
            model_fingerprint=model_fingerprint,
            dtype=dtype,
            num_layers=self.num_layers - sum(self.state_layers),
            num_kv_heads=self.num_kv_heads,
            block_size=block_size,
            head_dim=self.head_dim,
            num_planes=KEYS_AND_VALUES if self.latent is None else 1,
            grouping=() if self.state_numbers is None else self.kv_grouping(),
        )

    def kv_grouping(self) -> tuple[KvGroup, ...]:
        """The groups of layers (`KvLayout.grouping`) where windows keep only what they reach, and
        states what they are."""
        if self.state_numbers is not None:
            return group_states(self.state_layers, self.state_numbers)
        return group_layers(self.sliding_windows, self.max_position_embeddings)

    @property
    def state_numbers(self) -> int | None:
        """Numbers that a layer keeps of a sequence instead of keys and values; None if none
        does."""
        sizes = self.delta or self.mamba
        return None if sizes is None else sizes.state_numbers

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that are rotated."""
        if self.latent is not None:
            return self.latent.qk_rope_head_dim
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def embeds(self) -> bool:
        """Whether these are the first layers."""
        return self.first_layer == 0

    def sharded(self, tp_size: int) -> ModelConfig:
        """The configuration of one of `tp_size` ranks' share of each layer. More ranks than KV
        heads have copies of them. Raises ConfigError."""
        has_copies = tp_size % self.num_kv_heads == 0
        for name, size in (
            ("num_attention_heads", self.num_heads),
            ("num_key_value_heads", tp_size if has_copies else self.num_kv_heads),
            ("intermediate_size", self.intermediate_size),
        ):
            if size % tp_size:
                raise ConfigError(f"{name} {size} cannot be split over {tp_size} ranks")
        return replace(
            self,
            num_heads=self.num_heads // tp_size,
            num_kv_heads=max(1, self.num_kv_heads // tp_size),
            intermediate_size=self.intermediate_size // tp_size,
            experts=None if self.experts is None else self.experts.sharded(tp_size),
        )

    def staged(self, stage: int, num_stages: int) -> ModelConfig:
        """The configuration of one stage's layers. Raises ConfigError."""
        if num_stages > self.num_layers:
            raise ConfigError(
                f"num_hidden_layers {self.num_layers} cannot be split over {num_stages} stages"
            )
        own = stage_layers(self.num_layers, stage, num_stages)
        return replace(
            self,
            num_layers=len(own),
            layer_kinds=self.layer_kinds[own.start : own.stop],
            sliding_windows=self.sliding_windows[own.start : own.stop],
            state_layers=self.state_layers[own.start : own.stop],
            stored_numbers=self.stored_numbers[own.start : own.stop],
            first_layer=own.start,
            gives_logits=own.stop == self.num_layers,
        )

    @property
    def own_tokens(self) -> range:
        """The tokens whose rows of embedding and logits are here."""
        rank, size = self.vocab_share
        return range(*vocab_bounds(self.vocab_size, size)[rank : rank + 2])

    def part_of(self, shard: Shard) -> ModelConfig:
        """The configuration of one rank's part. Raises ConfigError."""
        part = self.sharded(shard.size).staged(shard.stage, shard.num_stages)
        rank, size = shard.rank, shard.size
        if size > self.vocab_size:
            raise ConfigError(f"vocab_size {self.vocab_size} cannot be split over {size} ranks")
        return replace(part, vocab_share=(rank, size))


def vocab_bounds(vocab_size: int, size: int) -> list[int]:
    """The first token of each of `size` ranks, and the end of the vocabulary."""
    return [rank * vocab_size // size for rank in range(size + 1)]


def load_model_config(folder: Path) -> ModelConfig:
    """The checked configuration of the checkpoint in `folder`.

    End-of-text ids come from generation_config.json if it has any, else from config.json; this is
    the order of transformers' `generate`. Raises ModelLoadError.
    """
    path, beside = folder / "config.json", folder / _MODEL_OPTIMIZER_FILE
    keys = JsonKeys(read_json_object(path), str(path))
    config = parse_model_config(keys, load_generation_config(folder).eos_token_ids)
    if config.quantization is not None or not is_there(beside):
        return config
    quantization = parse_model_optimizer(JsonKeys(read_json_object(beside), str(beside)))
    return replace(config, quantization=quantization)


def parse_model_config(keys: JsonKeys, generation_eos: tuple[int, ...] = ()) -> ModelConfig:
    """The checked configuration from the keys of a config.json. Raises ModelLoadError."""
    name, kind = _architecture(keys)
    keys = _with_defaults(keys, kind)
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


def _with_defaults(keys: JsonKeys, kind: Architecture) -> JsonKeys:
    """With what the file leaves out, and the keys of the language model where it is one part of
    several. A null stands for itself, not for a default."""
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
    if keys.raw("clip_qkv", None) is not None:
        raise keys.wrong("clip_qkv", "absent or null")
    if keys.raw("use_bidirectional_attention", None):
        raise keys.wrong("use_bidirectional_attention", "false or absent")
    return names[0], kind


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
    """The flag under the first of these names that is there, or `default`."""
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
