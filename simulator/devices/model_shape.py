"""The sizes of a model that determine its steps and its KV, from a config.json.

Reads dense models, mixtures of experts, latent attention, windows and states, also of models that
Baton does not serve. Nothing is loaded: a configuration alone suffices.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.gguf.folder import SUFFIX
from checkpoint.json_keys import JsonKeys, read_json_object
from checkpoint.model_source import resolve_model
from engine.checkpoint.config import completed_keys, parse_model_config
from engine.checkpoint.model_config import ModelConfig
from process.settings.home_paths import home_path
from protocol.errors import ConfigError, ModelLoadError
from protocol.layout import FP8, KvGroup, KvLayout, kept_grouping

_DTYPES: Mapping[float, str] = {1.0: FP8, 2.0: "bfloat16", 4.0: "float32"}


@dataclass(frozen=True)
class ModelShape:
    """One model. Parameters and KV values are counted for one layer, unless they say otherwise.

    - `attention_params`, `dense_params`: attention, and the feed-forward part that every token
      passes; `dense_layers` layers have only a feed-forward part of `lone_params`, no experts.
    - `expert_params`: one expert; of `num_experts` each token passes `experts_per_token`.
    - `head_params`: the output matrix of the whole model; `embedding_params` are kept beside it.
    - `attended_values`: multiplications of one query with one key and its value.
    - `kv_values`: the values that a token leaves in the cache.
    - `num_heads`: heads of queries; `config`: what Baton's workers make of the model, if they
      serve it.
    - `groups`: layers that keep the same tokens, as `KvLayout.groups`; some may keep states. The
      layers that keep no state are `kv_layers`.
    """

    name: str
    num_layers: int
    hidden_size: int
    attention_params: int
    dense_params: int
    head_params: int
    embedding_params: int
    attended_values: int
    kv_values: int
    num_kv_heads: int
    max_positions: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0
    dense_layers: int = 0
    lone_params: int = 0
    groups: tuple[KvGroup, ...] = ()
    num_heads: int = 1
    config: ModelConfig | None = None

    def check_split(self, num_ranks: int) -> None:
        """Raises ConfigError if a worker's ranks cannot share the model, as `ModelConfig.sharded`,
        or by its heads alone if Baton does not serve it."""
        if self.config is not None:
            self.config.sharded(num_ranks)
            return
        copied = num_ranks % self.num_kv_heads == 0
        for name, heads in (
            ("num_attention_heads", self.num_heads),
            ("num_key_value_heads", num_ranks if copied else self.num_kv_heads),
        ):
            if heads % num_ranks:
                raise ConfigError(f"{name} {heads} cannot be split over {num_ranks} ranks")

    @property
    def kv_layers(self) -> int:
        """Layers with keys and values."""
        states = [each for each in self.groups if each.state_numbers is not None]
        return self.num_layers - sum(len(each.layers) for each in states)

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Each window, and how many layers have it."""
        groups = [each for each in self.groups if each.state_numbers is None]
        return tuple((each.window, len(each.layers)) for each in groups if each.window is not None)

    @property
    def full_layers(self) -> int:
        """Layers that attend to all tokens."""
        return self.kv_layers - sum(number for _, number in self.windows)

    def kv_layout(self, block_size: int, value_bytes: float, kv_windows: str) -> KvLayout:
        """The layout of this model's blocks, of all its heads in one pool, in the data type that
        has so many bytes, or in two bytes. `kv_windows`: as workers have it."""
        return KvLayout(
            model_fingerprint=self.name,
            dtype=_DTYPES.get(value_bytes, "bfloat16"),
            num_layers=self.kv_layers,
            num_kv_heads=self.num_kv_heads,
            block_size=block_size,
            head_dim=self.kv_values // self.num_kv_heads,
            num_planes=1,
            grouping=kept_grouping(self.groups, kv_windows),
        )

    @property
    def num_params(self) -> int:
        """The number of the model's parameters."""
        with_experts = self.num_layers - self.dense_layers
        return (
            self.num_layers * self.attention_params
            + with_experts * (self.dense_params + self.num_experts * self.expert_params)
            + self.dense_layers * self.lone_params
            + self.head_params
            + self.embedding_params
        )


KNOWN: Mapping[str, Mapping[str, Any]] = {
    "Llama-3-8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "Llama-3-70B": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "OPT-13B": {
        "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40, "num_attention_heads": 40,
        "vocab_size": 50272, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 40960,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
}  # fmt: skip
"""Configurations of models in published results, by name."""


def model_shape(name: str) -> ModelShape:
    """The model with a known name, or in a config.json, its folder or a GGUF file. Raises
    ConfigError and ModelLoadError."""
    for known, values in KNOWN.items():
        if known.lower() == name.lower():
            return shape_of(JsonKeys(values, known), known)
    named, path = home_path(name, "--model"), config_file(name)
    if not path.is_file():
        raise ConfigError(
            f"--model {name}: give a config.json, a folder that has one, a GGUF file, or one of "
            f"{', '.join(KNOWN)}; of a model on a hub, save its config.json first"
        )
    folder = named.resolve() if _is_checkpoint(named) else named.resolve().parent
    return shape_of(JsonKeys(read_json_object(path), str(path)), folder.name)


def config_file(name: str) -> Path:
    """The config.json of the model in a file or folder; there may be none. That of a GGUF file lies
    in a folder of this user's cache, another one for each state of the file. Raises ConfigError and
    ModelLoadError."""
    path = home_path(name, "--model")
    if not _is_checkpoint(path):
        return path
    return (resolve_model(path) if path.exists() else path) / "config.json"


def _is_checkpoint(path: Path) -> bool:
    """Whether a path names a folder or a GGUF file, not a config.json."""
    return path.is_dir() or path.suffix.lower() == SUFFIX


def shape_of(keys: JsonKeys, name: str) -> ModelShape:
    """The shape that a config.json describes. Raises ModelLoadError."""
    groups: tuple[KvGroup, ...] = ()
    config: ModelConfig | None = None
    with suppress(ModelLoadError):  # a model that Baton does not serve may fail here
        config = parse_model_config(keys)
        groups = config.kv_grouping()
        keys = completed_keys(keys)
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    vocabulary = hidden * keys.integer("vocab_size")
    attention, attended, kv_values, kv_heads = _attention(keys, hidden, heads)
    experts = _first(keys, ("num_experts", "num_local_experts", "n_routed_experts"), 0)
    layers = keys.integer("num_hidden_layers")
    lone = 3 * hidden * keys.integer("intermediate_size", 0, minimum=0)
    if "ffn_dim" in keys:  # two matrices, without a gate
        lone = 2 * hidden * keys.integer("ffn_dim")
    elif not lone and not experts:
        keys.integer("intermediate_size")
    expert_width = _first(keys, ("moe_intermediate_size", "intermediate_size"), 0)
    shared_width = keys.integer("shared_expert_intermediate_size", 0, minimum=0)
    shared_width += expert_width * keys.integer("n_shared_experts", 0, minimum=0)
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        attention_params=attention,
        dense_params=hidden * (3 * shared_width + experts) if experts else lone,
        head_params=vocabulary,
        embedding_params=0 if keys.flag("tie_word_embeddings", False) else vocabulary,
        attended_values=attended,
        kv_values=kv_values,
        num_kv_heads=kv_heads,
        max_positions=keys.integer("max_position_embeddings", 131072),
        num_experts=experts,
        experts_per_token=keys.integer("num_experts_per_tok") if experts else 0,
        expert_params=3 * hidden * expert_width if experts else 0,
        dense_layers=keys.integer("first_k_dense_replace", 0, minimum=0, maximum=layers)
        if experts
        else 0,
        lone_params=lone,
        groups=groups,
        num_heads=heads,
        config=config,
    )


def _attention(keys: JsonKeys, hidden: int, heads: int) -> tuple[int, int, int, int]:
    """`(attention_params, attended_values, kv_values, num_kv_heads)`."""
    latent = keys.integer("kv_lora_rank", 0, minimum=0)
    if latent:
        return _latent_attention(keys, hidden, heads, latent)
    kv_heads = keys.integer("num_key_value_heads", heads)
    head_dim = keys.integer("head_dim", max(1, hidden // heads))
    width, kv_width = heads * head_dim, kv_heads * head_dim
    return 2 * hidden * (width + kv_width), 2 * width, 2 * kv_width, kv_heads


def _latent_attention(
    keys: JsonKeys, hidden: int, heads: int, latent: int
) -> tuple[int, int, int, int]:
    """As `_attention`, of attention whose keys and values share one latent vector."""
    rope = keys.integer("qk_rope_head_dim")
    key_dim, value_dim = keys.integer("qk_nope_head_dim"), keys.integer("v_head_dim")
    query = keys.integer("q_lora_rank", 0, minimum=0)
    width = heads * (key_dim + rope)
    params = query * (hidden + width) if query else hidden * width
    params += hidden * (latent + rope) + latent * heads * (key_dim + value_dim)
    params += heads * value_dim * hidden
    return params, heads * (2 * latent + rope), latent + rope, 1


def _first(keys: JsonKeys, names: tuple[str, ...], default: int) -> int:
    for name in names:
        if name in keys:
            found: int = keys.integer(name)
            return found
    return default
