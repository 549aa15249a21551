"""Paged attention with torch operations, on any device: the reference for correctness.

Reads the pool through flat views: one `index_select` of whole head-blocks gathers a sequence's keys
for one layer, head by head, into `[num_kv_heads, length, head_dim]`. Decode segments run together,
padded; other segments run one by one. Stale values in the pool beyond a sequence's context (even
NaN) never reach a result: they are masked in the scores and zeroed in the gathered copy, since
0 * NaN is NaN. Query heads that share a KV head are rows of one product; keys are never expanded
in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import Segment
from engine.attention.torch_scores import attention
from engine.checkpoint.attention_config import Scoring
from engine.device import to_device
from engine.kv_pool import KvPool
from protocol.block_order import LayerPlace, layer_places
from protocol.layout import TOKENS


@dataclass(frozen=True)
class _DecodeGroup:
    """B segments of one query token each, padded to S keys."""

    tokens: torch.Tensor | None  # [B] rows of q; None: all of them, in order
    # [2 * B * num_kv_heads * blocks] rows of `_head_blocks`, before the layer's start is added
    head_blocks: torch.Tensor
    # indices of rows to zero in the gathered copy, which has 2 * B * num_kv_heads * S rows
    stale: torch.Tensor
    mask: torch.Tensor  # [B, 1, 1, S], 0 or -inf


@dataclass(frozen=True)
class _Chunk:
    """Consecutive query tokens `start` to `end` of one segment, and the keys they see."""

    start: int
    end: int
    head_blocks: torch.Tensor  # [2 * num_kv_heads * blocks], as in `_DecodeGroup`
    keys: slice  # the positions in the gathered blocks that some query sees
    mask: torch.Tensor | None  # [end - start, number of keys], 0 or -inf; None: plain causal mask


@dataclass(frozen=True)
class _Plan:
    """One batch's plan for the layers of one kind."""

    decodes: list[_DecodeGroup]
    chunks: list[_Chunk]


_Strides = tuple[int, int]
"""The distances from one plane to the next and from one head to the next, in head-blocks."""
_Kind = tuple[int | None, _Strides]
"""Layers with the same kind share a plan: their window, and their strides in a block."""


class TorchAttention:
    """`GroupedBackend` over `pool`.

    `windows[i]` is layer i's sliding window in tokens, the token itself included, or None. A chunk
    whose mask would have more than `max_mask_elements` is computed in slices of its queries.
    """

    def __init__(
        self,
        pool: KvPool,
        windows: Sequence[int | None],
        max_mask_elements: int = 1 << 22,
        scoring: Scoring | None = None,
    ) -> None:
        self._pool = pool
        self._windows = tuple(windows)
        self._max_mask_elements = max_mask_elements
        assert len(self._windows) == len(pool.layout.layers)
        assert pool.layout.order == TOKENS
        _, _, self._num_kv_heads, self._block_size, self._head_dim = pool.layout.block_shape
        self._scoring = scoring or Scoring(1 / math.sqrt(self._head_dim))
        # a row is a token's k or v of a head; places and strides count rows
        head_dim, head_rows, per_block = self._head_dim, self._block_size, pool.tensor[0].numel()
        self._places = [
            LayerPlace(*(each // head_dim for each in place)) for place in layer_places(pool.layout)
        ]
        """Where each layer lies in a block."""
        self._block_stride = pool.tensor.stride(0) // head_dim
        num_rows = (len(pool.tensor) - 1) * self._block_stride + per_block // head_dim
        self._rows = pool.tensor.as_strided((num_rows, head_dim), (head_dim, 1))
        # [i]: the head-block that begins with row i
        heads = (num_rows - head_rows + 1, head_rows * head_dim)
        self._head_blocks = pool.tensor.as_strided(heads, (head_dim, 1))
        self._plans: dict[_Kind, _Plan] = {}
        self._slots: dict[_Strides, torch.Tensor] = {}

    def plan(self, segments: Sequence[Segment]) -> None:
        """See AttentionBackend."""
        tables = [_whole_table(segment) for segment in segments]
        kinds = {self._kind(layer) for layer in range(len(self._windows))}
        self._slots = {
            strides: self._device(self._slot_rows(segments, tables, strides))
            for strides in {strides for _, strides in kinds}
        }
        self._plans = {kind: self._plan_for(kind, segments, tables) for kind in kinds}

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See GroupedBackend."""
        num_tokens, num_heads, head_dim = q.shape
        kind = self._kind(layer)
        slots = self._slots[kind[1]] + self._places[layer].start
        self._rows.index_copy_(0, slots[0], k.reshape(-1, head_dim))
        self._rows.index_copy_(0, slots[1], v.reshape(-1, head_dim))
        # Query heads as [kv head, its group of query heads]
        grouped = q.reshape(num_tokens, self._num_kv_heads, -1, head_dim)
        plan = self._plans[kind]
        out = torch.empty_like(grouped)
        if sinks is not None:
            sinks = sinks.view(self._num_kv_heads, -1, 1)
        for group in plan.decodes:
            if group.tokens is None:
                out = self._decode(layer, group, grouped, sinks)
            else:
                some = grouped.index_select(0, group.tokens)
                result = self._decode(layer, group, some, sinks)
                out.index_copy_(0, group.tokens, result)
        for chunk in plan.chunks:
            out[chunk.start : chunk.end] = self._prefill(
                layer, chunk, grouped[chunk.start : chunk.end], sinks
            )
        return out.reshape(num_tokens, num_heads, head_dim)

    def _decode(
        self, layer: int, group: _DecodeGroup, q: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """`q` [B, num_kv_heads, group size, head_dim]; returns the same shape."""
        gathered = self._gather(layer, group.head_blocks)
        gathered.view(-1, self._head_dim).index_fill_(0, group.stale, 0.0)
        k, v = gathered.view(2, len(q), self._num_kv_heads, -1, self._head_dim)
        return attention(q, k, v, group.mask, self._scoring, sinks)

    def _prefill(
        self, layer: int, chunk: _Chunk, q: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """`q` [n, num_kv_heads, group size, head_dim]; returns the same shape."""
        gathered = self._gather(layer, chunk.head_blocks)
        gathered = gathered.view(2, self._num_kv_heads, 1, -1, self._head_dim)
        k, v = gathered[:, :, :, chunk.keys].expand(-1, -1, q.shape[2], -1, -1)
        sinks = None if sinks is None else sinks.unsqueeze(-1)
        result = attention(q.permute(1, 2, 0, 3), k, v, chunk.mask, self._scoring, sinks)
        return result.permute(2, 0, 1, 3)

    def _gather(self, layer: int, head_blocks: torch.Tensor) -> torch.Tensor:
        return self._head_blocks.index_select(0, head_blocks + self._places[layer].start)

    def _kind(self, layer: int) -> _Kind:
        place = self._places[layer]
        return self._windows[layer], (place.plane_stride, place.head_stride)

    # Planning, in numpy on the host

    def _plan_for(
        self, kind: _Kind, segments: Sequence[Segment], tables: list[np.ndarray]
    ) -> _Plan:
        window, _ = kind
        starts = np.cumsum([0] + [segment.query_len for segment in segments])
        # Segment indices by bit length of their block count: padding at most doubles a group's size
        decodes: dict[int, list[int]] = {}
        chunks = []
        for index, segment in enumerate(segments):
            if segment.query_len > 1:
                chunks += self._chunks(kind, segment, tables[index], int(starts[index]))
            else:
                first_key = _first_key(window, segment.context_len - 1)
                num_blocks = -(-segment.context_len // self._block_size)
                used_blocks = num_blocks - first_key // self._block_size
                decodes.setdefault(used_blocks.bit_length(), []).append(index)
        return _Plan(
            [
                self._decode_group(
                    kind,
                    np.array([segments[index].context_len for index in group]),
                    [tables[index] for index in group],
                    None if len(group) == len(segments) else starts[group],
                )
                for group in decodes.values()
            ],
            chunks,
        )

    def _decode_group(
        self,
        kind: _Kind,
        contexts: np.ndarray,
        tables: list[np.ndarray],
        tokens: np.ndarray | None,
    ) -> _DecodeGroup:
        window, strides = kind
        first_keys = np.maximum(0, contexts - window) if window else np.zeros_like(contexts)
        first_blocks = first_keys // self._block_size
        num_blocks = -(-contexts // self._block_size) - first_blocks
        padded = np.zeros((len(tables), num_blocks.max()), dtype=np.int64)  # pads with block 0
        for row, table, first, count in zip(padded, tables, first_blocks, num_blocks, strict=True):
            row[:count] = table[first : first + count]
        keys = np.arange(padded.shape[1] * self._block_size)
        keys = keys + (first_blocks * self._block_size)[:, None]  # [B, S] positions
        valid = (keys >= first_keys[:, None]) & (keys < contexts[:, None])
        stale = np.broadcast_to(
            ~valid[None, :, None, :], (2, len(tables), self._num_kv_heads, keys.shape[1])
        )
        return _DecodeGroup(
            tokens=None if tokens is None else self._device(tokens),
            head_blocks=self._device(self._head_block_rows(padded, strides)),
            stale=self._device(np.flatnonzero(stale)),
            mask=self._mask(valid[:, None, None, :]),
        )

    def _chunks(self, kind: _Kind, segment: Segment, table: np.ndarray, start: int) -> list[_Chunk]:
        """The segment's queries, in slices whose masks stay small."""
        window, strides = kind
        num_cached = segment.context_len - segment.query_len
        step = max(1, self._max_mask_elements // segment.context_len)
        chunks = []
        for offset in range(0, segment.query_len, step):
            end = min(offset + step, segment.query_len)
            queries = np.arange(num_cached + offset, num_cached + end)[:, None]  # positions
            first_key, last_key = _first_key(window, num_cached + offset), num_cached + end - 1
            first_block = first_key // self._block_size
            # From position 0 and within the window, query i sees keys 0 to i: a plain causal mask
            mask = None
            if num_cached + offset > 0 or (window and window < end):
                keys = np.arange(first_key, last_key + 1)
                visible = keys <= queries
                if window:
                    visible &= keys > queries - window
                mask = self._mask(visible)
            rows = self._head_block_rows(
                table[None, first_block : last_key // self._block_size + 1], strides
            )
            skipped = first_block * self._block_size
            seen = slice(first_key - skipped, last_key + 1 - skipped)
            chunks.append(_Chunk(start + offset, start + end, self._device(rows), seen, mask))
        return chunks

    def _slot_rows(
        self, segments: Sequence[Segment], tables: list[np.ndarray], strides: _Strides
    ) -> np.ndarray:
        """Where to store the batch's tokens, for a layer at the beginning of a block. Returns
        [2, N * num_kv_heads] rows of `_rows`."""
        blocks, offsets = [], []
        for segment, table in zip(segments, tables, strict=True):
            positions = np.arange(segment.context_len - segment.query_len, segment.context_len)
            blocks.append(table[positions // self._block_size])
            offsets.append(positions % self._block_size)
        head_blocks = self._head_block_rows(np.concatenate(blocks)[:, None], strides)
        head_blocks = head_blocks.reshape(2, -1, self._num_kv_heads)
        rows = head_blocks + np.concatenate(offsets)[:, None]
        return rows.reshape(2, -1)

    def _head_block_rows(self, blocks: np.ndarray, strides: _Strides) -> np.ndarray:
        """Rows of `_head_blocks` for `blocks` [B, n], ordered by k/v, sequence, head, for a layer
        at the beginning of a block."""
        plane_stride, head_stride = strides
        heads = np.arange(self._num_kv_heads) * head_stride
        parts = np.arange(2).reshape(2, 1, 1, 1) * plane_stride + heads.reshape(1, 1, -1, 1)
        return (blocks[None, :, None, :] * self._block_stride + parts).reshape(-1)

    def _mask(self, visible: np.ndarray) -> torch.Tensor:
        mask = np.where(visible, np.float32(0), np.float32(-np.inf))
        return to_device(torch.from_numpy(mask).to(self._pool.tensor.dtype), self._pool.device)

    def _device(self, rows: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(rows), self._pool.device)


def _whole_table(segment: Segment) -> np.ndarray:
    """The segment's table from block 0 on. Entries for the blocks that the segment leaves out are
    never read."""
    table = np.asarray(segment.block_table, dtype=np.int64)
    return table if not segment.first_block else np.pad(table, (segment.first_block, 0))


def _first_key(window: int | None, query: int) -> int:
    """The earliest position that the query at position `query` sees."""
    return max(0, query - window + 1) if window else 0
