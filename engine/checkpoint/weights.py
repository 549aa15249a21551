"""Loading a checkpoint's weights onto a device, tensor by tensor.

Owns the names and shapes that a configuration implies, and fuses q, k, v and gate, up into single
weights. Does not know how the model uses them. Names and shapes are checked from the files' headers
before a weight is read. Files are memory-mapped and copied straight into place, so memory never
holds a second copy of more than one tensor. On a CPU the embedding stays a mapping of its file
where the dtype allows, so only the rows that are looked up take memory. Do not overwrite the file
in place while the model runs; replace it instead.
"""

from __future__ import annotations

import logging
import math
import mmap
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.config import ModelConfig, Shard
from engine.checkpoint.files import TensorEntry, read_tensor_entries, weight_files
from engine.device import torch_dtype
from protocol.errors import ModelLoadError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called after each tensor with (bytes done, bytes in total), in sizes as stored."""

_FILE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_EMBED = "model.embed_tokens.weight"
_SPLIT_OUTPUTS = re.compile(r"\.(q|k|v|gate|up)_proj\.(weight|bias)$")
_SPLIT_INPUTS = re.compile(r"\.(o|down)_proj\.weight$")
_ADDED_ONCE = re.compile(r"\.(o|down)_proj\.bias$")
_IGNORED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.masked_bias$")


@dataclass
class LayerWeights:
    """One decoder layer. H hidden, Q query heads, K KV heads, D head_dim, I intermediate.

    Rows of `qkv` are q's, then k's, then v's; rows of `gate_up` gate's, then up's.
    """

    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [(Q + 2K) * D, H]
    qkv_bias: torch.Tensor | None  # [(Q + 2K) * D]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    o: torch.Tensor  # [H, Q * D]
    o_bias: torch.Tensor | None  # [H]
    post_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2I, H]
    gate_up_bias: torch.Tensor | None  # [2I]
    down: torch.Tensor  # [H, I]
    down_bias: torch.Tensor | None  # [H]


@dataclass
class Weights:
    """All weights of a model, on one device in one dtype; `lm_head` is `embed` if they are tied."""

    embed: torch.Tensor  # [vocab, H]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [H]
    lm_head: torch.Tensor  # [vocab, H]


def load_weights(
    folder: Path,
    config: ModelConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    shard: Shard | None = None,
) -> Weights:
    """The weights of the checkpoint in `folder`, cast to `dtype` (default: `config.dtype`).

    With `shard`, loads only a rank's part of each layer, as in `config.sharded`. The ranks' partial
    products add up to the full product.

    Raises ModelLoadError that names the tensor if it is missing or its shape does not match
    `config`. A tensor that the architecture does not have is logged and ignored.
    """
    entries: dict[str, TensorEntry] = {}
    for file in weight_files(folder):
        entries |= read_tensor_entries(file)
    dtype = dtype or torch_dtype(config.dtype)
    _check(folder, _places(config, _empty_weights(config, torch.device("meta"), dtype)), entries)
    part = config if shard is None else config.sharded(shard.size)
    weights = _empty_weights(part, torch.device(device), dtype)
    places = _places(part, weights)
    map_embed = weights.embed.device.type == "cpu" and _FILE_DTYPES[entries[_EMBED].dtype] == dtype
    done, total = 0, sum(entries[name].num_bytes for name in places)
    for name in sorted(places, key=lambda name: (entries[name].file, entries[name].begin)):
        stored = _map_tensor(name, entries[name])
        if name == _EMBED and map_embed:
            weights.embed = stored
        else:
            places[name].copy_(stored if shard is None else _part(name, stored, shard))
        done += entries[name].num_bytes
        if progress is not None:
            progress(done, total)
    if config.tie_word_embeddings:
        weights.lm_head = weights.embed
    return weights


def _part(name: str, stored: torch.Tensor, shard: Shard) -> torch.Tensor:
    """A rank's part of a tensor: some outputs of q, k, v, gate and up, some inputs of o and down,
    the whole of other tensors. Only rank 0 has the biases of o and down; the others get zeros."""
    if _SPLIT_OUTPUTS.search(name):
        return stored.chunk(shard.size)[shard.rank]
    if _SPLIT_INPUTS.search(name):
        return stored.chunk(shard.size, dim=1)[shard.rank]
    if _ADDED_ONCE.search(name) and shard.rank:
        return torch.zeros_like(stored)
    return stored


def _map_tensor(name: str, entry: TensorEntry) -> torch.Tensor:
    """Map the tensor from its file: pages are read when touched, and unmapped with the tensor."""
    start = entry.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    dtype, count = _FILE_DTYPES[entry.dtype], math.prod(entry.shape)
    if count * dtype.itemsize != entry.num_bytes:
        raise ModelLoadError(
            f"{entry.file}: tensor {name!r} has {entry.num_bytes} bytes, which do not hold "
            f"{list(entry.shape)} of {entry.dtype}; the file is corrupt"
        )
    try:
        with entry.file.open("rb") as file:
            memory = mmap.mmap(
                file.fileno(), entry.end - start, access=mmap.ACCESS_COPY, offset=start
            )
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {entry.file}: {error}") from error
    # ACCESS_COPY because torch wants a writable buffer; no code writes to it
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.begin - start)
    return flat.view(entry.shape)


def _check(folder: Path, places: dict[str, torch.Tensor], found: dict[str, TensorEntry]) -> None:
    for name, place in places.items():
        expected = tuple(place.shape)
        if name not in found:
            raise ModelLoadError(f"{folder}: tensor {name!r} {list(expected)} is missing")
        entry = found[name]
        if entry.shape != expected:
            raise ModelLoadError(
                f"{entry.file}: tensor {name!r} has the shape {list(entry.shape)}; "
                f"expected is {list(expected)}"
            )
        if entry.dtype not in _FILE_DTYPES:
            raise ModelLoadError(
                f"{entry.file}: tensor {name!r} is stored as {entry.dtype}; "
                f"supported are {', '.join(_FILE_DTYPES)}"
            )
    for name in sorted(found.keys() - places.keys()):
        if name != "lm_head.weight" and not _IGNORED.search(name):  # lm_head: tied, so unused
            logger.warning("%s: tensor %r is not used by this architecture", folder, name)


def _empty_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    hidden = config.hidden_size

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def empty_if(wanted: bool, size: int) -> torch.Tensor | None:
        return empty(size) if wanted else None

    q_rows = config.num_heads * config.head_dim
    qkv_rows = q_rows + 2 * config.num_kv_heads * config.head_dim
    gate_up_rows = 2 * config.intermediate_size
    layers = [
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(qkv_rows, hidden),
            qkv_bias=empty_if(config.qkv_bias, qkv_rows),
            q_norm=empty_if(config.qk_norm, config.head_dim),
            k_norm=empty_if(config.qk_norm, config.head_dim),
            o=empty(hidden, q_rows),
            o_bias=empty_if(config.o_bias, hidden),
            post_norm=empty(hidden),
            gate_up=empty(gate_up_rows, hidden),
            gate_up_bias=empty_if(config.mlp_bias, gate_up_rows),
            down=empty(hidden, config.intermediate_size),
            down_bias=empty_if(config.mlp_bias, hidden),
        )
        for _ in range(config.num_layers)
    ]
    embed = empty(config.vocab_size, hidden)
    lm_head = embed if config.tie_word_embeddings else empty(config.vocab_size, hidden)
    return Weights(embed=embed, layers=layers, final_norm=empty(hidden), lm_head=lm_head)


def _places(config: ModelConfig, weights: Weights) -> dict[str, torch.Tensor]:
    """The destination of each checkpoint tensor: views into `weights` by Hugging Face's names."""
    places: dict[str, torch.Tensor | None] = {
        _EMBED: weights.embed,
        "model.norm.weight": weights.final_norm,
    }
    if not config.tie_word_embeddings:
        places["lm_head.weight"] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        for name, place in _layer_places(config, layer).items():
            places[f"model.layers.{index}.{name}"] = place
    return {name: place for name, place in places.items() if place is not None}


def _layer_places(config: ModelConfig, layer: LayerWeights) -> dict[str, torch.Tensor | None]:
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    places = {
        "input_layernorm.weight": layer.input_norm,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
        "self_attn.o_proj.weight": layer.o,
        "self_attn.o_proj.bias": layer.o_bias,
        "post_attention_layernorm.weight": layer.post_norm,
        "mlp.down_proj.weight": layer.down,
        "mlp.down_proj.bias": layer.down_bias,
    }
    for kind, qkv, gate_up in (
        ("weight", layer.qkv, layer.gate_up),
        ("bias", layer.qkv_bias, layer.gate_up_bias),
    ):
        if qkv is not None:
            q, k, v = torch.split(qkv, [q_rows, kv_rows, kv_rows])
            places |= {
                f"self_attn.{n}_proj.{kind}": t for n, t in zip("qkv", (q, k, v), strict=True)
            }
        if gate_up is not None:
            gate, up = gate_up.chunk(2)
            places |= {f"mlp.gate_proj.{kind}": gate, f"mlp.up_proj.{kind}": up}
    return places
