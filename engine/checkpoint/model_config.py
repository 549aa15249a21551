"""The configuration of a decoder of any architecture, and of the part that a rank has.

Imports no torch. `engine.checkpoint.config` reads it from a checkpoint's config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.checkpoint.attention_config import Scoring
from engine.checkpoint.delta_config import DeltaConfig
from engine.checkpoint.experts_config import ExpertsConfig
from engine.checkpoint.formats.quantization import Quantization
from engine.checkpoint.latent_config import LatentConfig
from engine.checkpoint.mamba_config import MambaConfig
from engine.checkpoint.rope_config import RopeConfig
from engine.checkpoint.shard import Shard
from engine.models.architectures import LayerKinds
from protocol.errors import ConfigError
from protocol.layout import (
    KEYS_AND_VALUES,
    KvGroup,
    KvLayout,
    group_layers,
    group_states,
    stage_layers,
)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    `layer_kinds[i]` are the kinds of layer i's two halves. `sliding_windows[i]` is its window in
    tokens, including the token itself, or None if the layer attends to all earlier tokens. `dtype`
    is the checkpoint's dtype. `num_kv_heads` and `head_dim` are those of the KV pool: with `latent`
    attention there is one head, whose rows are latents.
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
    """Sizes of the layers that are mixtures of experts; None if there are none."""
    latent: LatentConfig | None = None
    """Sizes of latent attention; None for attention of grouped queries."""
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    """Sizes of the layers that keep a state (`state_layers`), by their kind; None if there are
    none."""
    state_layers: tuple[bool, ...] = ()
    stored_numbers: tuple[tuple[int, int], ...] = ()
    """By layer, the numbers of its attention and of its feed-forward half in the checkpoint."""
    rotary_dim: int | None = None
    """How many numbers of a head, from the first on, are rotated; None: all."""
    qk_rows_in_pairs: bool = False
    """Whether the files hold the rows of a head of q and k in the order of rotated pairs, not of
    halves; GGUF files of llama do."""
    quantization: Quantization | None = None
    """How weights in safetensors may be quantized; None if no weight is."""
    first_layer: int = 0
    """The number of the first of these layers in the whole model; above 0 in later stages."""
    gives_logits: bool = True
    """Whether these are the last layers."""
    vocab_share: tuple[int, int] = (0, 1)
    """The number of this rank's part of the vocabulary, for embedding and logits, and the number of
    parts."""

    def kv_layout(self, model_fingerprint: str, block_size: int, dtype: str) -> KvLayout:
        """The layout of this model's KV blocks, unsharded; `dtype` as in `KV_DTYPE_BYTES`. Layers
        that keep a state are a group of their own."""
        return KvLayout(
            model_fingerprint=model_fingerprint,
            dtype=dtype,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            block_size=block_size,
            head_dim=self.head_dim,
            num_planes=KEYS_AND_VALUES if self.latent is None else 1,
            grouping=() if self.state_numbers is None else self.kv_grouping(),
        )

    def kv_grouping(self) -> tuple[KvGroup, ...]:
        """The groups of layers (`KvLayout.grouping`), if layers with windows keep only their
        windows, and layers with states only their states."""
        sizes = self._states
        if sizes is not None:
            return group_states(self.state_layers, sizes.state_numbers, sizes.state_parts)
        return group_layers(self.sliding_windows, self.max_position_embeddings)

    @property
    def state_numbers(self) -> int | None:
        """How many numbers a layer with a state keeps of a sequence; None if no layer keeps a
        state."""
        return None if self._states is None else self._states.state_numbers

    @property
    def _states(self) -> DeltaConfig | MambaConfig | None:
        return self.delta or self.mamba

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
            delta=None if self.delta is None else self.delta.sharded(tp_size),
            mamba=None if self.mamba is None else self.mamba.sharded(tp_size),
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
