"""Loading a checkpoint's weights onto a device, tensor by tensor.

Owns the names and shapes that a configuration implies, and fuses q, k, v and gate, up into single
weights. Does not know how the model uses them. Names and shapes are checked from the files' headers
before a weight is read. Files are memory-mapped and copied straight into place (to a card through
two small buffers), so memory never holds a second copy of more than one tensor. On a CPU the
embedding stays a mapping of its file where the dtype allows, so only the rows that are looked up
take memory. Do not overwrite the file in place while the model runs; replace it instead. Another
worker's tensors are loaded in the same way, one after the other.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.blocks import (
    QUANTIZED_TYPES,
    BlockMatrix,
    BlockRows,
    Matrix,
    copy_dequantized,
    in_halves,
    together,
)
from engine.checkpoint.config import ModelConfig, Shard
from engine.checkpoint.files import read_tensor_entries, weight_files
from engine.checkpoint.staging import copies_to
from engine.checkpoint.stored_tensors import PLAIN_DTYPES, FileTensors, StoredTensors
from engine.device import available_bytes, torch_dtype
from protocol.errors import ModelLoadError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called after each tensor with (bytes done, bytes in total), in sizes as stored."""

_EMBED, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The tensors of each weight of a layer, in the order of its outputs."""
_SPLIT_OUTPUTS = re.compile(r"\.(q|k|v|gate|up)_proj\.(weight|bias)$")
_SPLIT_INPUTS = re.compile(r"\.(o|down)_proj\.weight$")
_ADDED_ONCE = re.compile(r"\.(o|down)_proj\.bias$")
_ROTATED = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")
_IGNORED = re.compile(
    r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.masked_bias$|^rope_freqs\.weight$"
)


@dataclass
class LayerWeights:
    """One decoder layer. H hidden, Q query heads, K KV heads, D head_dim, I intermediate.

    Rows of `qkv` are q's, then k's, then v's; rows of `gate_up` gate's, then up's.
    """

    input_norm: torch.Tensor  # [H]
    qkv: Matrix  # [(Q + 2K) * D, H]
    qkv_bias: torch.Tensor | None  # [(Q + 2K) * D]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    o: Matrix  # [H, Q * D]
    o_bias: torch.Tensor | None  # [H]
    post_norm: torch.Tensor  # [H]
    gate_up: Matrix  # [2I, H]
    gate_up_bias: torch.Tensor | None  # [2I]
    down: Matrix  # [H, I]
    down_bias: torch.Tensor | None  # [H]


@dataclass
class Weights:
    """All weights of a model, on one device in one dtype; `lm_head` is `embed` if they are tied.
    Quantized ones may be blocks instead, which are a mapping of their file."""

    embed: torch.Tensor | BlockMatrix  # [vocab, H]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [H]
    lm_head: torch.Tensor | BlockMatrix  # [vocab, H]


def load_weights(
    checkpoint: Path | StoredTensors,
    config: ModelConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    shard: Shard | None = None,
) -> Weights:
    """The weights of the checkpoint in a folder, or of another worker's, cast to `dtype` (default:
    `config.dtype`).

    With `shard`, loads only a rank's part of each layer, as in `config.sharded`. The ranks' partial
    products add up to the full product.

    Raises ModelLoadError that names the tensor if it is missing or its shape does not match
    `config`, and TransferError if another worker's tensors do not come. A tensor that the
    architecture does not have is logged and ignored.
    """
    target = _Target(torch.device(device), dtype or torch_dtype(config.dtype), shard)
    tensors = FileTensors(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    return _load(tensors, config, target, progress)


def load_block_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, progress: Progress | None = None
) -> Weights:
    """Like `load_weights` on a CPU, but quantized weights stay the blocks of their files."""
    target = _Target(torch.device("cpu"), dtype, keeps_blocks=True)
    return _load(FileTensors(folder), config, target, progress)


@dataclass(frozen=True)
class _Target:
    """Where weights go, and as what."""

    device: torch.device
    dtype: torch.dtype
    shard: Shard | None = None
    keeps_blocks: bool = False


def _load(
    tensors: StoredTensors, config: ModelConfig, target: _Target, progress: Progress | None
) -> Weights:
    entries = tensors.entries
    device, dtype, shard = target.device, target.dtype, target.shard
    expected = _places(config, _empty_weights(config, torch.device("meta"), dtype))
    _check(tensors, expected)
    part = config if shard is None else config.sharded(shard.size)
    blocks = _kept_blocks(expected, tensors, config) if target.keeps_blocks else {}
    _check_memory(tensors.where, part, target, blocks)
    weights = _empty_weights(part, device, dtype)
    places = _places(part, weights)
    map_embed = device.type == "cpu" and PLAIN_DTYPES.get(entries[_EMBED].dtype) == dtype
    copies = copies_to(device)
    done, total = 0, sum(entries[name].num_bytes for name in places)
    for name in sorted(places, key=lambda name: (entries[name].file, entries[name].begin)):
        if name == _EMBED and map_embed:
            weights.embed = tensors.read(name)
        elif name not in blocks:
            stored = _stored(name, tensors, config)
            copies.copy(places[name], stored if shard is None else _part(name, stored, shard))
        done += entries[name].num_bytes
        if progress is not None:
            progress(done, total)
    copies.finish()
    tensors.finish()
    if blocks:
        _put_blocks(weights, part, blocks)
    if config.tie_word_embeddings:
        weights.lm_head = weights.embed
    return weights


def has_blocks(folder: Path) -> bool:
    """Whether some of the checkpoint's tensors are quantized blocks. Raises ModelLoadError."""
    return any(
        entry.dtype in QUANTIZED_TYPES
        for file in weight_files(folder)
        for entry in read_tensor_entries(file).values()
    )


def _kept_blocks(
    places: dict[str, torch.Tensor], tensors: StoredTensors, config: ModelConfig
) -> dict[str, BlockRows]:
    """The model's quantized matrices by name, as mappings of their files. Quantized norms and
    biases are not among them: they are dequantized like any other vector."""
    found = {}
    for name, place in places.items():
        dtype = tensors.entries[name].dtype
        if dtype in QUANTIZED_TYPES and place.dim() == 2:
            heads = _heads_in_pairs(name, config)
            found[name] = BlockRows(tensors.read(name), dtype, heads)
    return found


def _heads_in_pairs(name: str, config: ModelConfig) -> int | None:
    """How many heads of q or k lie in rotated pairs in the file; None for other tensors."""
    match = _ROTATED.search(name)
    if match is None or not config.qk_rows_in_pairs:
        return None
    return config.num_heads if match[1] == "q" else config.num_kv_heads


def _put_blocks(weights: Weights, config: ModelConfig, blocks: dict[str, BlockRows]) -> None:
    """Replace what is quantized; the memory that was reserved for it has never been written to."""
    for index, layer in enumerate(weights.layers):
        places = _layer_places(config, layer)
        for field, names in _FUSED.items():
            found = [
                blocks.get(f"model.layers.{index}.{name}.weight", places[f"{name}.weight"])
                for name in names
            ]
            if any(isinstance(part, BlockRows) for part in found):
                setattr(layer, field, together(found))
    for field, name in (("embed", _EMBED), ("lm_head", _LM_HEAD)):
        if name in blocks:
            setattr(weights, field, BlockMatrix([blocks[name]]))


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


def _stored(name: str, tensors: StoredTensors, config: ModelConfig) -> torch.Tensor:
    """The whole tensor in the order of Hugging Face's rows, quantized ones as fp32."""
    stored, entry = tensors.read(name), tensors.entries[name]
    if entry.dtype in QUANTIZED_TYPES:
        values = torch.empty(entry.shape)
        copy_dequantized(torch.atleast_2d(stored), entry.dtype, torch.atleast_2d(values))
        stored = values
    num_heads = _heads_in_pairs(name, config)
    return stored if num_heads is None else in_halves(stored, num_heads)


def _check(tensors: StoredTensors, places: dict[str, torch.Tensor]) -> None:
    where, found = tensors.where, tensors.entries
    for name, place in places.items():
        expected = tuple(place.shape)
        if name not in found:
            raise ModelLoadError(f"{where}: tensor {name!r} {list(expected)} is missing")
        entry = found[name]
        if entry.shape != expected:
            raise ModelLoadError(
                f"{entry.file}: tensor {name!r} has the shape {list(entry.shape)}; "
                f"expected is {list(expected)}"
            )
        if entry.dtype not in PLAIN_DTYPES and entry.dtype not in QUANTIZED_TYPES:
            raise ModelLoadError(
                f"{entry.file}: tensor {name!r} is stored as {entry.dtype}; "
                f"supported are {', '.join(PLAIN_DTYPES)}"
            )
    unused = sorted(
        name
        for name in found.keys() - places.keys()
        if name != _LM_HEAD and not _IGNORED.search(name)  # lm_head: tied, so unused
    )
    if unused:
        logger.warning(
            "%s: %d tensors are not used by this architecture, the first is %r",
            where, len(unused), unused[0],
        )  # fmt: skip


def _check_memory(
    where: str, config: ModelConfig, target: _Target, blocks: dict[str, BlockRows]
) -> None:
    """Raises ModelLoadError if the weights cannot fit: the system would kill this process, since a
    file may claim more than there is (a sparse one takes no space on a disk)."""
    device, dtype = target.device, target.dtype
    places = _places(config, _empty_weights(config, torch.device("meta"), dtype))
    kept = {name: part.rows.nbytes for name, part in blocks.items()}
    needed = sum(kept.get(name, place.nbytes) for name, place in places.items() if name != _EMBED)
    available = available_bytes(device)
    if needed > available:
        raise ModelLoadError(
            f"{where}: the weights take {needed / 1e9:.1f} GB as {str(dtype)[6:]}, and {device} "
            f"has {available / 1e9:.1f} GB available"
        )


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
    assert isinstance(weights.embed, torch.Tensor)
    assert isinstance(weights.lm_head, torch.Tensor)
    places: dict[str, torch.Tensor | None] = {
        _EMBED: weights.embed,
        "model.norm.weight": weights.final_norm,
    }
    if not config.tie_word_embeddings:
        places[_LM_HEAD] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        for name, place in _layer_places(config, layer).items():
            places[f"model.layers.{index}.{name}"] = place
    return {name: place for name, place in places.items() if place is not None}


def _layer_places(config: ModelConfig, layer: LayerWeights) -> dict[str, torch.Tensor | None]:
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    places: dict[str, torch.Tensor | None] = {
        "input_layernorm.weight": layer.input_norm,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
        "self_attn.o_proj.weight": _plain(layer.o),
        "self_attn.o_proj.bias": layer.o_bias,
        "post_attention_layernorm.weight": layer.post_norm,
        "mlp.down_proj.weight": _plain(layer.down),
        "mlp.down_proj.bias": layer.down_bias,
    }
    for kind, qkv, gate_up in (
        ("weight", _plain(layer.qkv), _plain(layer.gate_up)),
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


def _plain(weight: Matrix) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    return weight
