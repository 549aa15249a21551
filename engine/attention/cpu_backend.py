"""Paged attention by our own C++ kernel, on the CPU, for fp32 and bf16 pools.

Plans a batch into units of work (tiles of queries of one segment, KV heads, a range of keys);
`native/attention.h` computes them. Long contexts of few queries are split at fixed lengths, so
that neither the batch nor the number of threads changes a row's result. Writes K and V to the
pool on the way.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import Segment
from engine.kv_pool import KvPool

_TILE_ROWS = 128  # query rows of a unit: enough to pay for packing a tile of keys
_SPLIT_ROWS = 64  # units of more rows are not split
_LANES = 16


class _Call(ctypes.Structure):
    """Mirrors AttentionCall in native/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pool", "q", "k", "v", "out")),
        *((name, ctypes.c_void_p) for name in ("slots", "units", "merges", "tables", "partials")),
        *((name, ctypes.c_int64) for name in ("q_stride", "kv_stride", "block_stride")),
        *((name, ctypes.c_int64) for name in ("value_offset", "num_tokens")),
        *((name, ctypes.c_int64) for name in ("num_units", "num_merges")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("block_size", "window", "is_bf16", "num_threads")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class _Plan:
    """The work of one batch on the layers of one window size."""

    units: np.ndarray  # [U, 10] int32, as Unit in native/attention.h, the costly first
    merges: np.ndarray  # [M, 5] int32, as Merge there
    num_partials: int  # floats


class KernelAttention:
    """`AttentionBackend` over `pool`, by the kernels in `library`.

    `windows[i]` is layer i's sliding window in tokens, the token itself included, or None.
    Contexts of few queries are computed in pieces of `split_keys` tokens.
    """

    def __init__(
        self,
        pool: KvPool,
        windows: Sequence[int | None],
        num_heads: int,
        library: ctypes.CDLL,
        split_keys: int = 1024,
    ) -> None:
        assert supports(pool), pool.layout
        _, num_layers, _, num_kv_heads, block_size, head_dim = pool.tensor.shape
        assert len(windows) == num_layers
        self._pool = pool
        self._windows = tuple(windows)
        self._split_keys = split_keys
        self._group = num_heads // num_kv_heads
        self._attend = library.baton_attention
        self._value_offset = num_kv_heads * block_size * head_dim
        self.layer_bytes = 2 * self._value_offset * pool.tensor.element_size()
        self._plans: dict[int | None, _Plan] = {}
        self._calls: dict[int | None, _Call] = {}
        self._slots = self._tables = np.empty(0, np.int64)
        self._partials = torch.empty(0)
        self._call = _Call(
            pool=pool.base_address,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            block_stride=pool.tensor.stride(0),
            value_offset=self._value_offset,
            is_bf16=pool.tensor.dtype == torch.bfloat16,
            scale=1.0 / math.sqrt(head_dim),
        )

    def plan(self, segments: Sequence[Segment]) -> None:
        """See AttentionBackend."""
        block_size = self._call.block_size
        query_lens = np.array([segment.query_len for segment in segments])
        contexts = np.array([segment.context_len for segment in segments])
        num_blocks = -(-contexts // block_size)
        self._tables = np.concatenate(
            [
                np.asarray(segment.block_table[:count], dtype=np.int64)
                for segment, count in zip(segments, num_blocks, strict=True)
            ]
        )
        assert len(self._tables) == num_blocks.sum()
        first_blocks = np.cumsum(num_blocks) - num_blocks
        first_tokens = np.cumsum(query_lens) - query_lens
        steps = np.arange(query_lens.sum()) - np.repeat(first_tokens, query_lens)
        positions = steps + np.repeat(contexts - query_lens, query_lens)
        blocks = self._tables[np.repeat(first_blocks, query_lens) + positions // block_size]
        self._slots = np.stack((blocks, positions % block_size), axis=1)
        self._plans = {
            window: self._plan_for(window, query_lens, contexts, first_tokens, first_blocks)
            for window in set(self._windows)
        }
        largest = max(plan.num_partials for plan in self._plans.values())
        if largest > self._partials.numel():
            self._partials = torch.empty(largest)
        self._calls = {window: self._call_for(plan, window) for window, plan in self._plans.items()}

    def planned(self, window: int | None) -> ctypes.Structure:
        """The planned batch as the kernels take it, for layers of this window, at the first
        layer's pool. Good until the next plan."""
        return self._calls[window]

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        q, k, v = _rows(q), _rows(k), _rows(v)
        if k.stride(0) != v.stride(0):
            k, v = k.contiguous(), v.contiguous()
        assert q.dtype == k.dtype == v.dtype == self._pool.tensor.dtype
        assert len(q) == len(k) == len(v) == len(self._slots)
        out = torch.empty(q.shape, dtype=q.dtype)
        call = self._calls[self._windows[layer]]
        call.pool = self._pool.base_address + layer * self.layer_bytes
        call.q, call.k, call.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.q_stride, call.kv_stride = q.stride(0), k.stride(0)
        call.out = out.data_ptr()
        self._attend(ctypes.byref(call))
        return out

    def _call_for(self, plan: _Plan, window: int | None) -> _Call:
        call = _Call.from_buffer_copy(self._call)
        call.slots, call.tables = self._slots.ctypes.data, self._tables.ctypes.data
        call.partials, call.num_tokens = self._partials.data_ptr(), len(self._slots)
        call.units, call.num_units = plan.units.ctypes.data, len(plan.units)
        call.merges, call.num_merges = plan.merges.ctypes.data, len(plan.merges)
        call.window, call.num_threads = window or 0, torch.get_num_threads()
        return call

    def _plan_for(
        self,
        window: int | None,
        query_lens: np.ndarray,
        contexts: np.ndarray,
        first_tokens: np.ndarray,
        first_blocks: np.ndarray,
    ) -> _Plan:
        tile_queries = max(1, _TILE_ROWS // self._group)
        segment, tile = _spread(-(-query_lens // tile_queries))
        offset = tile * tile_queries
        queries = np.minimum(query_lens[segment] - offset, tile_queries)
        position = (contexts - query_lens)[segment] + offset
        first_key = np.maximum(0, position - window + 1) if window else np.zeros_like(position)
        end_key = position + queries
        rows = queries * self._group
        pieces = (end_key - 1) // self._split_keys - first_key // self._split_keys + 1
        splits = np.where(rows > _SPLIT_ROWS, 1, pieces)
        # Units: of each tile every group of KV heads, of each group every split
        together = self._heads_together(int(splits.sum()), rows)
        groups = self._call.num_kv_heads // together
        of_tile, which = _spread(splits * groups)
        group, split = np.divmod(which, splits[of_tile])
        piece = first_key[of_tile] // self._split_keys + split
        whole = splits[of_tile] == 1
        first = np.where(whole, first_key[of_tile], piece * self._split_keys)
        first = np.maximum(first, first_key[of_tile])
        end = np.where(whole, end_key[of_tile], (piece + 1) * self._split_keys)
        end = np.minimum(end, end_key[of_tile])
        # Partial results lie by tile, head and split
        sizes = np.where(splits == 1, 0, rows * self._partial_vectors())
        of_heads = sizes * splits * self._call.num_kv_heads
        partials = np.cumsum(of_heads) - of_heads
        stride = (sizes * splits)[of_tile]
        partial = partials[of_tile] + group * together * stride + split * sizes[of_tile]
        units = [(first_tokens[segment] + offset)[of_tile], queries[of_tile], position[of_tile]]
        units += [group * together, np.full_like(group, together), first, end]
        units += [first_blocks[segment][of_tile], np.where(whole, -1, partial), stride]
        costly_first = np.argsort(-rows[of_tile] * (end - first), kind="stable")
        of_tile, head = _spread(np.where(splits == 1, 0, self._call.num_kv_heads))
        merges = [(first_tokens[segment] + offset)[of_tile], queries[of_tile], head]
        merges += [splits[of_tile], partials[of_tile] + head * (sizes * splits)[of_tile]]
        return _Plan(_int32(units)[costly_first], _int32(merges), int(of_heads.sum()) * _LANES)

    def _heads_together(self, num_units: int, rows: np.ndarray) -> int:
        """KV heads of a unit: as many as leave work for every thread, one where rows are many."""
        heads = self._call.num_kv_heads
        if rows.max() * heads > _TILE_ROWS:
            return 1
        wanted = torch.get_num_threads()
        return max(
            n
            for n in range(1, heads + 1)
            if heads % n == 0 and (n == 1 or num_units * (heads // n) >= wanted)
        )

    def _partial_vectors(self) -> int:
        """Vectors of one row that is not finished: its padded sums, and its maximum and total."""
        return -(-self._call.head_dim // _LANES) + 1


def supports(pool: KvPool) -> bool:
    """Whether the kernel can work on this pool."""
    return (
        pool.device.type == "cpu"
        and pool.tensor.dtype in (torch.float32, torch.bfloat16)
        and pool.layout.head_dim % 2 == 0
    )


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts [2, 3]: their indices, repeated, [0, 0, 1, 1, 1], and [0, 1, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _int32(columns: list[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.int32)


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """`heads` [N, heads, head_dim] with each token's heads in one piece, tokens any way apart."""
    _, num_heads, head_dim = heads.shape
    in_pieces = heads.stride(2) == 1 and (num_heads == 1 or heads.stride(1) == head_dim)
    return heads if in_pieces else heads.contiguous()
