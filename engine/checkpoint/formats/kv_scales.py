"""The scales of a checkpoint by which keys and values are divided before they become fp8.

A checkpoint has one scale for the keys of a layer and one for the values, or one for each head.
They belong to a pool of fp8; over a pool of other types they change nothing. Weights of another
worker whose checkpoint has scales are refused.
"""

from __future__ import annotations

import logging
import math
import re

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_weights import Weights
from engine.checkpoint.shard import Shard
from engine.checkpoint.stored_tensors import PLAIN_DTYPES, FileTensors, StoredTensors
from protocol.errors import ModelLoadError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(model\.layers\.\d{1,4}\.\w+)\.(?:attn\.|(?:qkv|k|v)_proj\.)?(k|v|kv)_scale")


def add_kv_scales(
    weights: Weights, tensors: StoredTensors, part: ModelConfig, shard: Shard | None
) -> bool:
    """Add the checkpoint's scales to the vectors `k_scale` and `v_scale` of the attention of a
    rank's layers, [KV heads], fp32. Returns whether the checkpoint has any, even for other ranks.
    Raises ModelLoadError."""
    found = {
        name: match for name in tensors.entries if (match := _NAME.fullmatch(name)) is not None
    }
    if found and not isinstance(tensors, FileTensors):
        raise ModelLoadError(
            f"{tensors.where}: scales of keys and values ({min(found)}) are read from files only"
        )
    layers = zip(part.stored_numbers, part.layer_kinds, weights.layers, strict=True)
    own = {
        f"model.layers.{number}.{kinds.attention_name}": layer.attention
        for (number, _), kinds, layer in layers
    }
    for name, match in found.items():
        if match[1] in own:
            scales = _read(tensors, name, part, shard).to(weights.final_norm.device)
            own[match[1]].vectors.update({f"{letter}_scale": scales for letter in match[2]})
    if found:
        logger.info("%s: keys and values are divided by %d scales", tensors.where, len(found))
    return bool(found)


def note_unused_scales(tensors: StoredTensors) -> None:
    """If a checkpoint has scales, log that the pool does not use them."""
    unused = [name for name in tensors.entries if _NAME.fullmatch(name)]
    if unused:
        logger.info(
            "%s: scales of keys and values (%s) are for KV in fp8 and change nothing here",
            tensors.where, min(unused),
        )  # fmt: skip


def _read(
    tensors: StoredTensors, name: str, part: ModelConfig, shard: Shard | None
) -> torch.Tensor:
    """The scales of a rank's heads, fp32."""
    entry = tensors.entries[name]
    if entry.dtype not in PLAIN_DTYPES:
        raise ModelLoadError(
            f"{entry.file}: tensor {name!r} is stored as {entry.dtype}; supported are "
            f"{', '.join(PLAIN_DTYPES)}"
        )
    number, own = math.prod(entry.shape), part.num_kv_heads
    size, rank = (1, 0) if shard is None else (shard.size, shard.rank)
    if (number != 1 and max(1, number // size) != own) or not number:
        raise ModelLoadError(
            f"{entry.file}: tensor {name!r} has {number} scales; expected is one, or one for each "
            "KV head"
        )
    scales = tensors.read(name).to(torch.float32).reshape(-1)
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise ModelLoadError(f"{entry.file}: tensor {name!r} must have numbers above 0")
    if number == 1:
        return scales.repeat(own)
    first = rank * number // size
    return scales[first : first + own].clone()
