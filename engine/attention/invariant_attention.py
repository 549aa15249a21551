"""Paged attention on a card whose results do not depend on the batch.

Our own kernel computes decodes, chunks and mixed steps alike, over the tiles of
`engine.attention.tiles`. So a token's result has the same bits alone, beside other sequences and
in any chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import Segment
from engine.attention.fixed_buffers import FixedBuffers
from engine.attention.paging import pad_decodes, page
from engine.attention.pool_layers import PoolAttention, PoolLayers
from engine.attention.tiles import (
    Partials,
    Tiles,
    TileShape,
    TileTensors,
    divide,
    most_items,
    pad,
)
from engine.packed_copy import on_device


@dataclass(frozen=True)
class TileCall:
    """The tensors that the kernel reads and writes for the attention of one layer.

    `q` is [N, num_heads, head_dim], of which a token's heads are contiguous; `out` the same,
    contiguous; `keys` and `values` as in KvTarget; `window` in tokens, or None.
    """

    q: torch.Tensor
    out: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tiles: TileTensors
    shape: TileShape
    partials: Partials
    window: int | None
    scale: float  # of scores


Attend = Callable[[TileCall], None]
"""Computes the tiles of a call, and joins their parts."""


class InvariantAttention(PoolAttention):
    """`StoringAttention` for any batch, by the kernels that `attend_tiles` launches. Backends that
    take turns on one stream may share `partials`."""

    def __init__(self, layers: PoolLayers, partials: Partials, attend_tiles: Attend) -> None:
        super().__init__(layers)
        self._partials = partials
        self._attend_tiles = attend_tiles
        self._shape = TileShape.of(layers.num_heads // layers.num_kv_heads)
        self._tiles: dict[int | None, TileTensors] = {}

    def plan(self, segments: Sequence[Segment]) -> None:
        """See AttentionBackend."""
        layers = self._layers
        batch = page(segments, layers.block_size)
        tiles = {
            window: divide(batch, layers.block_size, self._shape.num_queries, window)
            for window in set(layers.windows)
        }
        arrays = {"slots": batch.slots, "blocks": batch.blocks}
        for window, each in tiles.items():
            arrays |= _named(window, each)
        on = on_device(arrays, layers.device)
        self._slots = on["slots"]
        self._tiles = {
            window: TileTensors(
                on[_name("items", window)],
                on[_name("segments", window)],
                on[_name("joins", window)],
                on["blocks"],
            )
            for window in tiles
        }

    def attend(
        self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See StoringAttention; computes no sinks."""
        assert sinks is None
        layers = self._layers
        window, out = layers.windows[layer], q.new_empty(q.shape)
        keys, values = layers.caches[layer]
        tiles, shape = self._tiles[window], self._shape
        scale = layers.scoring.scale
        self._attend_tiles(
            TileCall(q, out, keys, values, tiles, shape, self._partials, window, scale)
        )
        return out


class InvariantBuffers:
    """The arrays that captured kernels read, for up to M decodes. Graphs that take turns on one
    stream share them."""

    def __init__(self, layers: PoolLayers, max_sequences: int, max_blocks: int) -> None:
        """Zeroed buffers for contexts with at most `max_blocks` blocks in total, none of which is
        longer than an equal share of them."""
        self.max_context = max_blocks // max_sequences * layers.block_size
        self.windows = sorted(set(layers.windows), key=lambda window: window or 0)
        num_items = most_items(max_sequences, self.max_context)
        sizes = {"items": 4 * num_items, "segments": 4 * max_sequences, "joins": 3 * max_sequences}
        arrays = [("slots", max_sequences, torch.int64)]
        for window in self.windows:
            arrays += [(_name(what, window), size, torch.int32) for what, size in sizes.items()]
        arrays.append(("blocks", max_blocks, torch.int32))  # last: a step fills its beginning only
        self.arrays = FixedBuffers(arrays, layers.device)


class FixedInvariantDecodes(InvariantAttention):
    """`StoringAttention` for `size` decodes, padding included. A graph captures its kernels; `plan`
    fills the buffers that they read."""

    def __init__(
        self,
        layers: PoolLayers,
        size: int,
        buffers: InvariantBuffers,
        partials: Partials,
        attend_tiles: Attend,
    ) -> None:
        super().__init__(layers, partials, attend_tiles)
        self._size = size
        self._num_items = most_items(size, buffers.max_context)
        self._buffers = buffers
        self._slots = buffers.arrays["slots"][:size]

        def view(what: str, window: int | None, rows: int, columns: int) -> torch.Tensor:
            return buffers.arrays[_name(what, window)][: rows * columns].view(rows, columns)

        self._tiles = {
            window: TileTensors(
                view("items", window, self._num_items, 4),
                view("segments", window, size, 4),
                view("joins", window, size, 3),
                buffers.arrays["blocks"],
            )
            for window in buffers.windows
        }

    def plan(self, segments: Sequence[Segment]) -> None:
        """See AttentionBackend; takes at most `size` segments of one token each."""
        block_size, num_queries = self._layers.block_size, self._shape.num_queries
        batch = pad_decodes(page(segments, block_size), self._size)
        arrays = {"slots": batch.slots}
        for window in self._buffers.windows:
            tiles = divide(batch, block_size, num_queries, window)
            arrays |= _named(window, pad(tiles, self._num_items, self._size))
        self._buffers.arrays.fill(arrays | {"blocks": batch.blocks})


def _named(window: int | None, tiles: Tiles) -> dict[str, np.ndarray]:
    arrays = {"items": tiles.items, "segments": tiles.segments, "joins": tiles.joins}
    return {_name(what, window): array for what, array in arrays.items()}


def _name(what: str, window: int | None) -> str:
    return f"{what}, window {window}"
