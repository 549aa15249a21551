"""Paged latent attention with torch operations, on any device: the reference for correctness.

The number of a segment's query tokens decides how it is computed. Few queries attend to the latents
themselves: the up-projections are absorbed into queries and results. For many queries, keys and
values of each head are computed from the latents first. Both go through a context in pieces of
bounded size, whose results are weighted by their totals, so memory does not grow with the context.
Decodes of one token are computed together, padded. Rows of the pool beyond a sequence's context may
hold anything, even NaN: they are masked in the scores and zeroed in the gathered copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import Segment
from engine.attention.latents import UpProjection
from engine.attention.softmax_pieces import PieceSums, flash, product, weighted
from engine.checkpoint.latent_config import LatentConfig
from engine.device import to_device
from engine.kv_pool import KvPool
from protocol.layout import TOKENS


@dataclass(frozen=True, eq=False)
class PlannedSegment:
    """A segment of a batch, whose query tokens begin at `start`."""

    start: int
    segment: Segment
    blocks: np.ndarray  # [blocks] rows of `_blocks`, for layer 0


@dataclass(frozen=True)
class _Decodes:
    """B segments of one query token each, padded to equally many blocks."""

    tokens: torch.Tensor  # [B] rows of q
    blocks: torch.Tensor  # [B, blocks] rows of `_blocks`, for layer 0
    contexts: torch.Tensor  # [B]


@dataclass(frozen=True)
class _Chunk:
    """The query tokens `start` to `end` of a batch, all of one segment."""

    start: int
    end: int
    context_len: int
    blocks: torch.Tensor  # [blocks] rows of `_blocks`, for layer 0

    @property
    def num_cached(self) -> int:
        """The position of the first query."""
        return self.context_len - (self.end - self.start)


class TorchLatentAttention:
    """`LatentBackend` over `pool`.

    Contexts are computed in pieces of about `piece_tokens`, and queries in slices of at most
    `max_scores` scores. Segments of up to `most_absorbed` queries (default: see `LatentConfig`)
    attend to the latents themselves.
    """

    def __init__(
        self,
        pool: KvPool,
        config: LatentConfig,
        piece_tokens: int = 512,
        max_scores: int = 1 << 24,
        most_absorbed: float | None = None,
    ) -> None:
        layout = pool.layout
        assert layout.num_planes == layout.num_kv_heads == 1, layout
        assert layout.order == TOKENS, layout
        assert layout.head_dim == config.latent_dim, layout
        self._pool = pool
        self._scale = config.softmax_scale
        self._rank = config.kv_lora_rank
        self._most_absorbed = config.most_absorbed if most_absorbed is None else most_absorbed
        self._block_size, self._num_layers = layout.block_size, len(layout.layers)
        self._piece_blocks = max(1, piece_tokens // layout.block_size)
        self._max_scores = max_scores
        self._has_flash = pool.device.type == "cpu"
        self._rows = pool.tensor.view(-1, layout.head_dim)  # one row: a token's latent in a layer
        self._blocks = pool.tensor.view(-1, layout.block_size * layout.head_dim)
        self._slots = torch.empty(0)
        self._expanded: list[_Chunk] = []
        self._decodes: list[_Decodes] = []  # decodes and chunks in which queries are absorbed
        self._chunks: list[_Chunk] = []

    def plan(self, segments: Sequence[Segment]) -> None:
        """See AttentionBackend."""
        rows = [self._block_rows(segment) for segment in segments]
        self._slots = self._device(self._slot_rows(segments, rows))
        starts = np.cumsum([0] + [segment.query_len for segment in segments]).tolist()
        parts = [PlannedSegment(*each) for each in zip(starts, segments, rows, strict=False)]
        few: list[PlannedSegment] = []
        many: list[PlannedSegment] = []
        for part in parts:
            (few if part.segment.query_len <= self._most_absorbed else many).append(part)
        self._expanded = [self._chunk(part) for part in many]
        self.plan_absorbed(few)

    def plan_absorbed(self, parts: Sequence[PlannedSegment]) -> None:
        """Prepares what all layers share for the segments that attend to latents."""
        # Segments by bit length of their block count: padding at most doubles a group's size
        decodes: dict[int, list[PlannedSegment]] = {}
        self._chunks = []
        for part in parts:
            if part.segment.query_len == 1:
                decodes.setdefault(len(part.blocks).bit_length(), []).append(part)
            else:
                self._chunks.append(self._chunk(part))
        self._decodes = [
            _Decodes(
                self._device(np.array([part.start for part in group])),
                self._device(_padded([part.blocks for part in group])),
                self._device(np.array([part.segment.context_len for part in group])),
            )
            for group in decodes.values()
        ]

    def run_latents(
        self, layer: int, q: torch.Tensor, latents: torch.Tensor, up: UpProjection
    ) -> torch.Tensor:
        """See LatentBackend."""
        self._rows.index_copy_(0, self._slots + layer * self._block_size, latents)
        q = q.transpose(0, 1)  # [num_heads, N, qk_head_dim]
        out = q.new_empty((q.shape[0], q.shape[1], up.value_dim))
        self.run_absorbed(layer, q, latents, up, out)
        for chunk in self._expanded:
            queries = q[:, chunk.start : chunk.end]
            out[:, chunk.start : chunk.end] = self._attend(layer, chunk, queries, up)
        return out.transpose(0, 1)

    def run_absorbed(
        self,
        layer: int,
        q: torch.Tensor,
        latents: torch.Tensor,
        up: UpProjection,
        out: torch.Tensor,
    ) -> None:
        """Attends to latents for the segments of `plan_absorbed`. `q` is [num_heads, N,
        qk_head_dim]; `latents` are stored. Writes these segments' rows of `out` [num_heads, N,
        v_head_dim]."""
        for group in self._decodes:
            queries = up.absorbed(q.index_select(1, group.tokens))
            out.index_copy_(1, group.tokens, up.values_of(self._decode(layer, group, queries)))
        for chunk in self._chunks:
            queries = up.absorbed(q[:, chunk.start : chunk.end])
            sums = self._attend(layer, chunk, queries, None)
            out[:, chunk.start : chunk.end] = up.values_of(sums)

    def _decode(self, layer: int, group: _Decodes, q: torch.Tensor) -> torch.Tensor:
        """Sums of latents [num_heads, B, rank] for `q` [num_heads, B, latent_dim]."""
        q = q.transpose(0, 1)
        sums = PieceSums(len(q), q.shape[1], self._rank, q)
        for first in range(0, group.blocks.shape[1], self._piece_blocks):
            blocks = group.blocks[:, first : first + self._piece_blocks]
            latents = self._gather(layer, blocks.flatten()).view(len(q), -1, q.shape[2])
            begin = first * self._block_size
            positions = torch.arange(begin, begin + latents.shape[1], device=q.device)
            is_stale = positions >= group.contexts[:, None]  # [B, keys]
            latents.masked_fill_(is_stale.unsqueeze(2), 0.0)
            scores = product(q, latents.transpose(1, 2)).mul_(self._scale)  # [B, num_heads, keys]
            scores.masked_fill_(is_stale.unsqueeze(1), -torch.inf)
            sums.add(0, *weighted(scores, latents[:, :, : self._rank]))
        return sums.result().transpose(0, 1)

    def _attend(
        self, layer: int, chunk: _Chunk, q: torch.Tensor, up: UpProjection | None
    ) -> torch.Tensor:
        """Sums of values [num_heads, n, v_head_dim] for `q` [num_heads, n, qk_head_dim]; without
        `up`, sums of latents for absorbed queries."""
        num_heads, num_queries, _ = q.shape
        sums = PieceSums(num_heads, num_queries, self._rank if up is None else up.value_dim, q)
        for begin, end in self._pieces(chunk):
            latents = self._piece(layer, chunk, begin, end)
            if up is None:
                keys, values = latents[None], latents[None, :, : self._rank]
            else:
                keys, values = up.expanded(latents)
            first = max(0, begin - chunk.num_cached)  # the first query that sees keys of the piece
            last = max(0, end - chunk.num_cached)  # the first query that sees all
            if first < last:
                sums.add(first, *self._part(q[:, first:last], keys, values, is_causal=True))
            for start in range(last, num_queries, self._slice_of(num_heads, end - begin)):
                part = q[:, start : start + self._slice_of(num_heads, end - begin)]
                sums.add(start, *self._part(part, keys, values, is_causal=False))
        return sums.result()

    def _part(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Means of `values` [num_heads or 1, keys, size] for queries `q` [num_heads, n, size], and
        the logarithms of their totals, [num_heads, n], fp32. `is_causal`: query i sees keys 0 to
        i."""
        if self._has_flash:
            return flash(q, keys, values, self._scale, is_causal)
        scores = product(q, keys.transpose(1, 2)).mul_(self._scale)
        if is_causal:
            later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu_(1)
            scores.masked_fill_(later, -torch.inf)
        return weighted(scores, values)

    def _pieces(self, chunk: _Chunk) -> Iterator[tuple[int, int]]:
        """Ranges of positions of the chunk's context. No range has both cached positions and the
        chunk's own."""
        size = self._piece_blocks * self._block_size
        for first, stop in ((0, chunk.num_cached), (chunk.num_cached, chunk.context_len)):
            for begin in range(first, stop, size):
                yield begin, min(begin + size, stop)

    def _slice_of(self, num_heads: int, num_keys: int) -> int:
        """How many queries are computed together."""
        return max(1, self._max_scores // (num_heads * num_keys))

    def _piece(self, layer: int, chunk: _Chunk, begin: int, end: int) -> torch.Tensor:
        """The latents of positions `begin` to `end` of a chunk's context, [keys, latent_dim]."""
        first = begin // self._block_size
        gathered = self._gather(layer, chunk.blocks[first : -(-end // self._block_size)])
        skipped = first * self._block_size
        return gathered.view(-1, self._rows.shape[1])[begin - skipped : end - skipped]

    def _gather(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        return self._blocks.index_select(0, blocks + layer)

    # Planning, in numpy on the host

    def _chunk(self, part: PlannedSegment) -> _Chunk:
        segment = part.segment
        end = part.start + segment.query_len
        return _Chunk(part.start, end, segment.context_len, self._device(part.blocks))

    def _block_rows(self, segment: Segment) -> np.ndarray:
        """Rows of `_blocks` of the segment's context, for layer 0."""
        num_blocks = -(-segment.context_len // self._block_size)
        return np.asarray(segment.block_table[:num_blocks], dtype=np.int64) * self._num_layers

    def _slot_rows(self, segments: Sequence[Segment], rows: list[np.ndarray]) -> np.ndarray:
        """Rows of `_rows` where the batch's tokens are stored in layer 0, [N]."""
        slots = []
        for segment, blocks in zip(segments, rows, strict=True):
            positions = np.arange(segment.context_len - segment.query_len, segment.context_len)
            slots.append(
                blocks[positions // self._block_size] * self._block_size
                + positions % self._block_size
            )
        return np.concatenate(slots)

    def _device(self, rows: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(rows), self._pool.device)


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    """Rows of blocks as one array, filled up with 0."""
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for line, blocks in zip(padded, rows, strict=True):
        line[: len(blocks)] = blocks
    return padded
