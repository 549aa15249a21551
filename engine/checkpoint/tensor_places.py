"""Where a tensor of a checkpoint goes, and which part of it a rank reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.checkpoint.layer_tensors import Split
from engine.checkpoint.model_config import vocab_bounds
from engine.checkpoint.quantized_blocks import QUANTIZED_TYPES, dequantized, in_halves
from engine.checkpoint.shard import Shard
from engine.checkpoint.stored_tensors import StoredTensors


@dataclass(frozen=True)
class Place:
    """Where a tensor of the checkpoint goes. `heads_in_pairs`: how many heads of q or k in the
    tensor lie in rotated pairs. `is_wide`, `offset` and `input_sections` as in `LayerTensor`,
    `middle` and `sections` as in `Rows`."""

    tensor: torch.Tensor
    split: Split = Split.NONE
    heads_in_pairs: int | None = None
    is_wide: bool = False
    offset: float = 0.0
    middle: tuple[int, ...] = ()
    sections: tuple[int, ...] = ()
    input_sections: tuple[int, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        rows, *inputs = self.tensor.shape
        return (rows, *self.middle, *inputs)


_ALL = (slice(None),)


def cut(
    shape: Sequence[int], place: Place, shard: Shard
) -> tuple[Sequence[slice], Sequence[slice]]:
    """A rank's rows and columns of a tensor, in ranges."""
    if place.split is Split.OUTPUTS:
        return _own_ranges(shape[0], place.sections or (len(place.tensor),), shard), _ALL
    if place.split is Split.TOKENS:
        first, end = vocab_bounds(shape[0], shard.size)[shard.rank : shard.rank + 2]
        return (slice(first, end),), _ALL
    if place.split is Split.INPUTS:
        sections = place.input_sections or (place.tensor.shape[1],)
        return _ALL, _own_ranges(shape[1], sections, shard)
    return _ALL, _ALL


def _own_ranges(size: int, sections: Sequence[int], shard: Shard) -> list[slice]:
    """A rank's numbers of each section, where all ranks have `size` numbers. If there are fewer
    parts than ranks, neighbours have the same."""
    ranges, before, num_parts = [], 0, size // sum(sections)
    for own in sections:
        first = before + shard.rank * num_parts // shard.size * own
        ranges.append(slice(first, first + own))
        before += num_parts * own
    return ranges


def part_of(stored: torch.Tensor, place: Place, shard: Shard | None) -> torch.Tensor:
    """A rank's part of a tensor."""
    if shard is None:
        return stored
    if place.split is Split.FIRST and shard.rank:
        return torch.zeros_like(stored)
    rows, columns = cut(stored.shape, place, shard)
    part = _joined([stored[some] for some in rows], 0)
    return part if stored.dim() == 1 else _joined([part[:, some] for some in columns], 1)


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def stored_part(
    name: str, tensors: StoredTensors, place: Place, shard: Shard | None
) -> torch.Tensor:
    """A rank's part of a tensor in the order of Hugging Face's rows, quantized ones as fp32. Reads
    no other rows of a file's tensor."""
    stored, entry = tensors.read(name), tensors.entries[name]
    if place.middle:
        stored = stored.flatten(1)
    if entry.dtype not in QUANTIZED_TYPES:
        part = part_of(stored, place, shard)
    elif shard is None or len(entry.shape) < 2:
        values = dequantized(torch.atleast_2d(stored), entry.dtype, slice(None))
        part = part_of(values.view(entry.shape), place, shard)
    else:
        rows, columns = cut(entry.shape, place, shard)
        kept = _joined([stored[some] for some in rows], 0)
        part = _joined([dequantized(kept, entry.dtype, some) for some in columns], 1)
    return part if place.heads_in_pairs is None else in_halves(part, place.heads_in_pairs)


def heads_in_file(place: Place, shape: Sequence[int]) -> int | None:
    """How many heads of a tensor that is stored in rotated pairs are in the file."""
    heads = place.heads_in_pairs
    return None if heads is None else heads * shape[0] // len(place.tensor)
