"""Divides the attention of a batch into tiles whose results do not depend on the batch.

A tile is a fixed number of consecutive positions of one sequence, with all heads of a KV head's
group. It starts at a multiple of that number, so a token's place in its tile depends on its
position only. The keys that a tile sees are divided into parts of `PART_TOKENS`, also from position
0. Each part is summed for itself, key tile by key tile, and the parts are joined in order. Whether
one program computes all parts of a tile, or several programs one part each, changes no bit: it only
decides how many programs are busy.

The arrays are built on the host, once per step; all layers with one window share them. Pure numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.paging import PagedBatch

PART_TOKENS = 512
MAX_PARTIALS = 512
"""The most parts of a step that get programs of their own. A step with more parts has enough tiles
to keep a card busy."""
NO_ITEM = -1
"""The segment of an item that pads a captured launch."""
ALL_PARTS = -1
_ROWS = 64


@dataclass(frozen=True)
class TileShape:
    """The tiles of a model: the group's size, padded to a power of two, and positions per tile."""

    group: int
    padded_group: int
    num_queries: int

    @classmethod
    def of(cls, group: int) -> TileShape:
        """The shape for `group` query heads per KV head."""
        padded = 1 << (group - 1).bit_length()
        return cls(group, padded, max(1, _ROWS // padded))


@dataclass(frozen=True)
class Tiles:
    """The work of one step in the layers of one window; arrays are int32 and contiguous.

    Items with one part write its sums to a row of the partial results, and a join follows.
    """

    items: np.ndarray  # [I, 4]: segment, first position, part or ALL_PARTS, row of the partials
    segments: np.ndarray
    """[B, 4]: first row in the batch, first position, context, and where in the batch's blocks
    block 0 of the context is or would be"""
    joins: np.ndarray  # [J, 3]: row in the batch, first row of the partials, number of parts


@dataclass(frozen=True)
class TileTensors:
    """`Tiles` on a device, with the batch's `blocks`, int32."""

    items: torch.Tensor
    segments: torch.Tensor
    joins: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True)
class Partials:
    """Room for the sums of parts that are to be joined, fp32."""

    sums: torch.Tensor  # [MAX_PARTIALS, num_heads, head_dim]
    totals: torch.Tensor  # [MAX_PARTIALS, num_heads, 2]: the largest score, the sum of the weights

    @classmethod
    def empty(cls, num_heads: int, head_dim: int, device: torch.device) -> Partials:
        """Memory on `device`. Steps that take turns on one stream may share it."""
        sums = torch.empty((MAX_PARTIALS, num_heads, head_dim), device=device)
        return cls(sums, torch.empty((MAX_PARTIALS, num_heads, 2), device=device))


def divide(batch: PagedBatch, block_size: int, num_queries: int, window: int | None) -> Tiles:
    """The tiles of `batch`, of `num_queries` positions each.

    Segments of one token with the most parts get a program for each part, until MAX_PARTIALS are
    taken; all other tiles are computed whole.
    """
    rows, lengths = batch.query_starts[:-1], np.diff(batch.query_starts)
    num_blocks = batch.firsts + np.diff(batch.block_starts)
    contexts = (num_blocks - 1) * block_size + batch.last_lens
    firsts = contexts - lengths
    tables = batch.block_starts[:-1] - batch.firsts
    segments = np.stack((rows, firsts, contexts, tables), axis=1)
    first_keys = np.zeros_like(firsts) if window is None else np.maximum(0, firsts - window + 1)
    first_parts = first_keys // PART_TOKENS
    num_parts = (contexts - 1) // PART_TOKENS + 1 - first_parts
    is_divided = _divided(np.where(lengths == 1, num_parts, 1))
    first_tiles = firsts // num_queries
    counts = np.where(is_divided, num_parts, (contexts - 1) // num_queries + 1 - first_tiles)
    owner = np.repeat(np.arange(len(rows)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    has_part = is_divided[owner]
    tiles = first_tiles[owner] + np.where(has_part, 0, number)
    parts = np.where(has_part, first_parts[owner] + number, ALL_PARTS)
    partials = np.where(has_part, np.cumsum(has_part) - 1, 0)
    items = np.stack((owner, tiles * num_queries, parts, partials), axis=1)
    joined = num_parts[is_divided]
    joins = np.stack((rows[is_divided], np.cumsum(joined) - joined, joined), axis=1)
    return Tiles(*(np.ascontiguousarray(a, dtype=np.int32) for a in (items, segments, joins)))


def pad(tiles: Tiles, num_items: int, num_joins: int) -> Tiles:
    """`tiles` with items and joins that do nothing, up to these numbers."""
    items = np.zeros((num_items, 4), dtype=np.int32)
    items[:, 0] = NO_ITEM
    items[: len(tiles.items)] = tiles.items
    joins = np.zeros((num_joins, 3), dtype=np.int32)
    joins[: len(tiles.joins)] = tiles.joins
    return Tiles(items, tiles.segments, joins)


def most_items(num_decodes: int, max_context: int) -> int:
    """The most items of a step of `num_decodes` decodes with contexts up to `max_context`."""
    most_parts = -(-max_context // PART_TOKENS)
    return min(num_decodes * most_parts, num_decodes + MAX_PARTIALS)


def _divided(num_parts: np.ndarray) -> np.ndarray:
    """Which segments are divided: those with the most parts first, while there is room for partial
    results."""
    order = np.argsort(-num_parts, kind="stable")
    taken = np.cumsum(num_parts[order])
    is_divided = np.zeros(len(num_parts), dtype=bool)
    is_divided[order] = (num_parts[order] > 1) & (taken <= MAX_PARTIALS)
    return is_divided
