"""Loading a checkpoint's weights onto a device, tensor by tensor.

Names and shapes are checked from the files' headers before a weight is read; only weights of the
logits that a tied checkpoint stores are compared with the embedding first. Files are memory-mapped
and copied straight into place (to a card through two small buffers), so memory never holds a second
copy of more than one tensor. On a CPU the embedding stays a mapping of its file where the dtype
allows, so only the rows that are looked up take memory. Do not overwrite the file in place while
the model runs; replace it instead. Another worker's tensors are loaded in the same way, one after
the other.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from checkpoint.gguf.folder import SUFFIX
from engine.checkpoint.device_copies import copies_to
from engine.checkpoint.files import read_all_entries
from engine.checkpoint.formats.paired_experts import PairedExperts
from engine.checkpoint.formats.quantized_tensors import QuantizedTensors
from engine.checkpoint.gguf_names import llama_cpp_name
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_weights import (
    EMBED,
    LM_HEAD,
    Places,
    Weights,
    empty_weights,
    halves,
    places_in,
    plain,
    rows_of,
)
from engine.checkpoint.quantized_blocks import (
    QUANTIZED_TYPES,
    BlockMatrix,
    BlockRows,
    StoredRows,
    together,
)
from engine.checkpoint.shard import Shard
from engine.checkpoint.stored_tensors import PLAIN_DTYPES, FileTensors, StoredTensors
from engine.checkpoint.tensor_places import Place, cut, heads_in_file, part_of, stored_part
from engine.device import available_bytes, torch_dtype
from protocol.errors import ModelLoadError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called after each tensor with (bytes done, bytes in total), in sizes as stored."""

Blocks = dict[str, list[StoredRows]]
"""Quantized matrices by name, each in parts of whole rows."""

_IGNORED = re.compile(
    r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.masked_bias$|^rope_freqs\.weight$"
    r"|\.attn_rot_embd\.weight$"
    r"|\.self_attn\.[kv]_b_proj\.weight$"  # GGUF files may have both forms of kv_b_proj
    r"|\.(q|k|v|kv|prob)_scale$"  # see engine.checkpoint.formats.kv_scales
)
_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d{1,4})\.")
_PART = re.compile(_LAYER.pattern + r".+\.(weight|bias)")
_AHEAD = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head(\.|_))")
"""In the names of tensors that only layers have that predict further tokens ahead."""


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

    Raises ModelLoadError that names the tensor if it is missing, if its shape does not match
    `config`, or if it is a part of a layer that the architecture does not have; and TransferError
    if another worker's tensors do not come. Other tensors that the architecture does not have are
    logged and ignored.
    """
    target = _Target(torch.device(device), dtype or torch_dtype(config.dtype), shard)
    if isinstance(checkpoint, Path):
        return _load(FileTensors(checkpoint), config, target, progress)
    if config.quantization is not None:  # their parts are not read in the order of their places
        raise ModelLoadError(f"{checkpoint.where}: quantized weights are read from files only")
    return _load(checkpoint, config, target, progress)


def load_block_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    shard: Shard | None = None,
) -> Weights:
    """Like `load_weights`, but quantized weights stay in their files, as blocks. Those whose
    parts on a `shard` are not whole blocks are dequantized."""
    target = _Target(torch.device(device), dtype, shard, keeps_blocks=True)
    return _load(FileTensors(folder), config, target, progress)


@dataclass(frozen=True)
class _Target:
    """The device that weights go to, and the form that they take there."""

    device: torch.device
    dtype: torch.dtype
    shard: Shard | None = None
    keeps_blocks: bool = False


def _load(
    tensors: StoredTensors, config: ModelConfig, target: _Target, progress: Progress | None
) -> Weights:
    device, dtype, shard = target.device, target.dtype, target.shard
    is_file = isinstance(tensors, FileTensors)
    logs = logging.WARNING if shard is None or shard.is_first else logging.DEBUG
    config = _as_stored(tensors, config, logs)
    expected = places_in(config, empty_weights(config, torch.device("meta"), dtype))
    if config.experts is not None and config.experts.are_paired:
        tensors = PairedExperts(tensors)
    if config.quantization is not None:
        tensors = QuantizedTensors(tensors, config.quantization, expected)
    entries = tensors.entries
    _check(tensors, expected, config, is_file, logs)
    part = config if shard is None else config.part_of(shard)
    own = places_in(part, empty_weights(part, torch.device("meta"), dtype))
    blocks = _kept_blocks(own, tensors, shard) if target.keeps_blocks else {}
    _check_memory(tensors.where, part, target, blocks)
    weights = empty_weights(part, device, dtype, blocks.keys())
    places = places_in(part, weights)
    map_embed = device.type == "cpu" and PLAIN_DTYPES.get(entries[EMBED].dtype) == dtype
    copies = copies_to(device)
    done, total = 0, sum(entries[name].num_bytes for name in places)
    for name in sorted(places, key=lambda name: (entries[name].file, entries[name].begin)):
        place = places[name]
        if name == EMBED and map_embed:
            weights.embed = part_of(tensors.read(name), place, shard)
        elif name not in blocks or (name == EMBED and not _is_looked_up(blocks)):
            copies.copy(place.tensor, stored_part(name, tensors, place, shard))
        done += entries[name].num_bytes
        if progress is not None:
            progress(done, total)
    copies.finish()
    tensors.finish()
    for place in places.values():
        if place.offset:
            place.tensor.add_(place.offset)
    _put_blocks(weights, part, blocks)
    return weights


def _as_stored(tensors: StoredTensors, config: ModelConfig, level: int) -> ModelConfig:
    """The configuration, untied if the checkpoint has weights of the logits that differ from the
    embedding's, as in transformers. Weights of the logits from another worker are used without
    comparison. `level` is that of the log entry about untied weights."""
    entries = tensors.entries
    stored = [entries[name].dtype for name in (EMBED, LM_HEAD) if name in entries]
    are_both_plain = len(stored) == 2 and PLAIN_DTYPES.keys() >= set(stored)
    if not config.tie_word_embeddings or not are_both_plain:
        return config
    if isinstance(tensors, FileTensors) and torch.equal(*map(tensors.read, (EMBED, LM_HEAD))):
        return config
    logger.log(
        level,
        "%s: config.json ties the embedding to the logits; %r is stored and used for the logits",
        tensors.where, LM_HEAD,
    )  # fmt: skip
    return replace(config, tie_word_embeddings=False)


def has_blocks(folder: Path, config: ModelConfig) -> bool:
    """Whether some of the checkpoint's tensors are quantized. Raises ModelLoadError."""
    return config.quantization is not None or any(
        entry.dtype in QUANTIZED_TYPES for entry in read_all_entries(folder).values()
    )


def _kept_blocks(places: Places, tensors: StoredTensors, shard: Shard | None) -> Blocks:
    """The model's quantized matrices by name, as mappings of their files. Quantized norms and
    biases are not among them: they are dequantized like any other vector."""
    found = {}
    for name, place in places.items():
        if place.tensor.dim() == 2 and not place.is_wide:
            shape = tensors.entries[name].shape
            whole = tensors.panel_rows(name, heads_in_file(place, shape))
            parts = [] if whole is None else [whole]
            if whole is not None and shard is not None:
                parts = _own_parts(whole, *cut(shape, place, shard))
            if parts:
                found[name] = parts
    return found


def _own_parts(
    whole: StoredRows, rows: Sequence[slice], columns: Sequence[slice]
) -> list[StoredRows]:
    """Some rows of a quantized matrix, in ranges; none if they are not whole blocks, or columns
    that do not follow each other."""
    if len(columns) > 1:
        return []
    parts = [part for some in rows if (part := whole.part(some, columns[0])) is not None]
    return parts if len(parts) == len(rows) else []


def _put_blocks(weights: Weights, config: ModelConfig, blocks: Blocks) -> None:
    """Replace quantized matrices with their blocks."""
    for name, tensors, kind in halves(config, weights):
        for each in tensors:
            matrix = kind.matrices.get(each.name)
            if matrix is None or not any(f"{name}.{rows.name}" in blocks for rows in each.rows):
                continue
            parts = zip(each.rows, rows_of(each, plain(matrix)), strict=True)
            found = (blocks.get(f"{name}.{rows.name}", [part]) for rows, part in parts)
            kind.matrices[each.name] = together([part for some in found for part in some])
    if _is_looked_up(blocks):
        weights.embed = BlockMatrix(blocks[EMBED])
    logits = blocks.get(EMBED if config.tie_word_embeddings else LM_HEAD)
    if logits is not None and config.gives_logits:
        weights.lm_head = BlockMatrix(logits)
    elif config.tie_word_embeddings:
        weights.lm_head = weights.embed


def _is_looked_up(blocks: Blocks) -> bool:
    """Whether an embedding can be read from its blocks; others are dequantized for it."""
    return all(isinstance(rows, BlockRows) for rows in blocks.get(EMBED, (None,)))


def _check(
    tensors: StoredTensors, places: Places, config: ModelConfig, is_file: bool, level: int
) -> None:
    """`is_file`: whether the tensors are those of files. `level`: of log entries about tensors that
    are not used."""
    for name, place in places.items():
        _check_tensor(tensors, name, place, config)
    found = tensors.entries
    unused = sorted(
        name
        for name in found.keys() - places.keys()
        if name != LM_HEAD and not _IGNORED.search(name)  # lm_head: tied, so unused
    )
    num_layers = 1 + max(map(max, config.stored_numbers))
    ahead = [name for name in unused if (_layer_of(name) or 0) >= num_layers]
    if is_file:
        _refuse_other_layers(tensors, ahead, num_layers)
        _refuse_other_parts(tensors, set(unused).difference(ahead), config.architecture)
    if ahead:
        logger.log(
            min(level, logging.INFO),
            "%s: layers from %d on predict further tokens ahead and are left out (%d tensors)",
            tensors.where, num_layers, len(ahead),
        )  # fmt: skip
        unused = [name for name in unused if name not in ahead]
    if unused:
        logger.log(
            level,
            "%s: %d tensors are not used by this architecture, the first is %r",
            tensors.where, len(unused), unused[0],
        )  # fmt: skip


def _check_tensor(tensors: StoredTensors, name: str, place: Place, config: ModelConfig) -> None:
    expected, entry = place.stored_shape, tensors.entries.get(name)
    shown = _shown(name, tensors)
    if entry is None:
        reason = ", and 'tie_word_embeddings' is false" if name == LM_HEAD else ""
        raise ModelLoadError(
            f"{tensors.where}: tensor {shown!r} {list(expected)} is missing{reason}"
        )
    if entry.dtype not in PLAIN_DTYPES and entry.dtype not in QUANTIZED_TYPES:
        others = " (others need a 'quantization_config')" if config.quantization is None else ""
        raise ModelLoadError(
            f"{entry.file}: tensor {shown!r} is stored as {entry.dtype}; "
            f"supported are {', '.join(PLAIN_DTYPES)}{others}"
        )
    if entry.shape != expected:
        raise ModelLoadError(
            f"{entry.file}: tensor {shown!r} has the shape {list(entry.shape)}; "
            f"expected is {list(expected)}"
        )


def _refuse_other_layers(tensors: StoredTensors, ahead: Sequence[str], num_layers: int) -> None:
    """Raise ModelLoadError if one of the tensors behind the model's layers belongs to a layer that
    does not predict tokens ahead."""
    key = "block_count" if tensors.where.endswith(SUFFIX) else "num_hidden_layers"
    ahead_layers = {_layer_of(name) for name in tensors.entries if _AHEAD.search(name)}
    for name in ahead:
        if _layer_of(name) not in ahead_layers:
            raise ModelLoadError(
                f"{tensors.entries[name].file}: tensor {_shown(name, tensors)!r} belongs to none "
                f"of the {num_layers} layers that the configuration has ({key!r})"
            )


def _refuse_other_parts(tensors: StoredTensors, unused: Collection[str], architecture: str) -> None:
    """Raise ModelLoadError if one of the unused tensors is a part of a layer, so that the model
    would compute something else without it. Biases of 0, which GPTQ's writers add, are none."""
    for name in sorted(unused):
        if _PART.fullmatch(name) is not None and not _is_bias_of_0(tensors, name):
            raise ModelLoadError(
                f"{tensors.entries[name].file}: tensor {_shown(name, tensors)!r} has no place in "
                f"{architecture}; is config.json that of another model?"
            )


def _is_bias_of_0(tensors: StoredTensors, name: str) -> bool:
    is_plain_bias = name.endswith(".bias") and tensors.entries[name].dtype in PLAIN_DTYPES
    return is_plain_bias and not bool(tensors.read(name).any())


def _shown(name: str, tensors: StoredTensors) -> str:
    """A tensor's name in messages: that in its file."""
    return llama_cpp_name(name) if tensors.where.endswith(SUFFIX) else name


def _layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to; None if it belongs to no layer."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def _check_memory(where: str, config: ModelConfig, target: _Target, blocks: Blocks) -> None:
    """Raises ModelLoadError if the weights cannot fit. Otherwise the system would kill this
    process. A small file may claim large tensors, since a sparse file takes no space on a disk."""
    device, dtype = target.device, target.dtype
    places = places_in(config, empty_weights(config, torch.device("meta"), dtype))
    kept = {name: sum(part.num_bytes for part in parts) for name, parts in blocks.items()}
    sizes = {name: place.tensor.nbytes for name, place in places.items() if name != EMBED}
    needed = sum(kept.get(name, size) for name, size in sizes.items())
    available = available_bytes(device)
    if needed > available:
        raise ModelLoadError(
            f"{where}: the weights take {needed / 1e9:.1f} GB as {str(dtype)[6:]}, and {device} "
            f"has {available / 1e9:.1f} GB available"
        )
