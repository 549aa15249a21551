"""Paged attention by our own C++ kernel, on the CPU, for pools of fp32, bf16 and e4m3.

`native/plan.h` divides a batch into units of work (a tile of one segment's queries, KV heads, a
range of keys). `native/attention.h` computes the units, `few_rows.h` those with few rows, and
`tiled_attention.h` with AMX. Long contexts with few queries are split at fixed lengths, so that
neither the batch nor the number of threads changes a row's result. Pools are ordered token by
token, or as the matrix products read them (`native/paired.h`). Also writes K and V to the pool,
for e4m3 rounded to nearest. Owns the memory of plans and partial results.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.base import Segment
from engine.checkpoint.attention_config import Scoring
from engine.kv_pool import KvPool
from protocol.block_order import layer_places
from protocol.layout import FP8, PAIRS, SPLIT, TOKENS, KvLayout

_COMPUTED = (torch.float32, torch.bfloat16)  # dtypes of queries and results
_TILE_ROWS = 256  # query rows of a unit: enough to pay for packing a tile of keys
_SPLIT_ROWS = 64  # units with more rows are not split
_GROUP = 16  # consecutive tokens in a pool of pairs, and numbers of a vector
_QUAD_DIMS = 64  # dimensions of two tokens' values in a quad, see native/split.h


class _Call(ctypes.Structure):
    """Mirrors AttentionCall in native/attention_call.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pool", "q", "k", "v", "out")),
        *((name, ctypes.c_void_p) for name in ("slots", "units", "merges", "tables", "partials")),
        ("spans", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layer_spans", "q_stride", "kv_stride")),
        *((name, ctypes.c_int64) for name in ("block_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("value_offset", "num_tokens")),
        *((name, ctypes.c_int64) for name in ("num_units", "num_merges")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("block_size", "window", "is_bf16", "is_fp8")),
        *((name, ctypes.c_int32) for name in ("is_paired", "num_threads")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        ("sinks", ctypes.c_void_p),
    )


class _PlanCall(ctypes.Structure):
    """Mirrors PlanCall in native/plan.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_lens", "wanted", "contexts")),
        *((name, ctypes.c_void_p) for name in ("tables", "firsts", "slots")),
        *((name, ctypes.c_void_p) for name in ("units", "merges")),
        *((name, ctypes.c_int64) for name in ("num_segments", "max_units", "max_merges")),
        *((name, ctypes.c_int64) for name in ("num_units", "num_merges", "num_partials")),
        *((name, ctypes.c_int32) for name in ("block_size", "group", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("window", "tile_rows", "split_rows", "split_keys")),
        ("num_threads", ctypes.c_int32),
    )


class _WindowPlan:
    """The work units for layers of one window size, in memory that grows with the largest batch."""

    def __init__(self) -> None:
        self._reserve(64, 64)

    def fill(self, plan: Callable[..., None], call: _PlanCall) -> None:
        """Plan into this memory; `call` receives the counts."""
        while True:
            call.units, call.max_units = self._units_at, len(self._units)
            call.merges, call.max_merges = self._merges_at, len(self._merges)
            plan(ctypes.byref(call))
            if call.num_units <= call.max_units and call.num_merges <= call.max_merges:
                return
            self._reserve(2 * call.num_units, 2 * call.num_merges + 1)

    def _reserve(self, num_units: int, num_merges: int) -> None:
        self._units = np.empty((num_units, 10), np.int32)  # as Unit in native/attention_call.h
        self._merges = np.empty((num_merges, 5), np.int32)  # as Merge there
        self._units_at, self._merges_at = self._units.ctypes.data, self._merges.ctypes.data


class KernelPlace(NamedTuple):
    """Where the kernels find a layer of a model: its index in the backend's `plans`, its number
    among the layers of the plan's pool, where in a block it begins, in bytes, and how many numbers
    lie between two heads there."""

    plan: int
    pool_layer: int
    pool_start: int
    head_stride: int


class KernelAttention:
    """`GroupedBackend` over `pool`, by the kernels in `library`.

    `windows[i]` is layer i's sliding window in tokens, the token itself included, or None.
    Contexts with few queries are computed in pieces of `split_keys` tokens. Scores are multiplied
    by `scale`. In a pool of one plane, its rows are both keys and values.
    """

    def __init__(
        self,
        pool: KvPool,
        windows: Sequence[int | None],
        num_heads: int,
        library: ctypes.CDLL,
        split_keys: int = 1024,
        scoring: Scoring | None = None,
    ) -> None:
        layout = pool.layout
        assert supports(layout.dtype, layout.head_dim), layout
        assert layout.order in orders_for(layout, library), layout
        assert pool.device.type == "cpu"
        num_layers, num_planes, num_kv_heads, block_size, head_dim = layout.block_shape
        assert len(windows) == num_layers
        scoring = scoring or Scoring(1 / math.sqrt(head_dim))
        self._pool = pool
        self._windows = tuple(windows)
        self._attend, self._divide = library.baton_attention, library.baton_plan
        self._places, self._number_bytes = layer_places(layout), pool.tensor.element_size()
        self._plans = {window: _WindowPlan() for window in set(windows)}
        self._calls: dict[int | None, _Call] = {}
        self._last_plan = _WindowPlan()
        self._last_call: _Call | None = None
        self._tables = array("q")
        self._slots = np.empty((0, 2), np.int64)
        self.longest = 0
        """Tokens in the longest context of the planned batch."""
        self._partials = torch.empty(0)
        shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
        self._plan_call = _PlanCall(
            group=num_heads // num_kv_heads,
            tile_rows=_TILE_ROWS,
            split_rows=max(_SPLIT_ROWS, num_heads // num_kv_heads),
            split_keys=split_keys,
            **shape,
        )
        self._call = _Call(
            pool=pool.base_address,
            num_heads=num_heads,
            block_stride=pool.tensor.stride(0),
            value_offset=(num_planes - 1) * self._places[0].plane_stride,
            is_fp8=pool.tensor.dtype == torch.float8_e4m3fn,
            is_paired=layout.order != TOKENS,
            spans=None if pool.spans is None else pool.spans.data_ptr(),
            layer_spans=0 if pool.spans is None else pool.spans.stride(0),
            scale=math.log2(math.e) * scoring.scale,
            cap=math.log2(math.e) * (scoring.cap or 0.0),
            **shape,
        )

    def plan(self, segments: Sequence[Segment]) -> None:
        """See AttentionBackend."""
        block_size = self._call.block_size
        tables: list[int] = []
        for segment in segments:
            num_blocks = -(-segment.context_len // block_size) - segment.first_block
            assert len(segment.block_table) >= num_blocks
            tables += segment.block_table[:num_blocks]
        # array is faster than numpy here: a decode step has many small arrays and cold caches.
        query_lens = array("q", [segment.query_len for segment in segments])
        contexts = array("q", [segment.context_len for segment in segments])
        firsts = array("q", [segment.first_block for segment in segments])
        self._tables = array("q", tables)
        num_tokens = sum(query_lens)
        self.longest = max(contexts, default=0)
        if len(self._slots) < num_tokens:
            self._slots = np.empty((num_tokens, 2), np.int64)
        call = self._plan_call
        call.query_lens = call.wanted = _address(query_lens)
        call.contexts, call.tables = _address(contexts), _address(self._tables)
        call.firsts = _address(firsts)
        call.slots = self._slots.ctypes.data
        call.num_segments, call.num_threads = len(segments), torch.get_num_threads()
        self._calls = {}
        for window, plan in self._plans.items():
            call.window = window or 0
            plan.fill(self._divide, call)
            self._calls[window] = self._call_for(call, num_tokens)
        self._plan_last(segments, num_tokens)
        last = [] if self._last_call is None else [self._last_call]
        for each in (*self._calls.values(), *last):  # all share the largest call's memory
            each.partials = self._partials.data_ptr()

    def planned(self, window: int | None) -> ctypes.Structure:
        """The kernels' call structure of the planned batch, for layers of this window; points to
        the pool's first block. Valid until the next plan."""
        return self._calls[window]

    @property
    def plans(self) -> list[ctypes.Structure]:
        """The call structures of the planned batch, see `place`."""
        return [self._calls[window] for window in self._plans]

    @property
    def num_plans(self) -> int:
        """Number of `plans`."""
        return len(self._plans)

    def place(self, layer: int) -> KernelPlace:
        """Where the kernels find a layer."""
        plan, at = list(self._plans).index(self._windows[layer]), self._places[layer]
        return KernelPlace(plan, layer, at.start * self._number_bytes, at.head_stride)

    @property
    def planned_last(self) -> ctypes.Structure | None:
        """The call structure for the last layer, with the wanted tokens only: their queries are
        contiguous, all keys and values are already written. None if all tokens are wanted."""
        return self._last_call

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See GroupedBackend."""
        q, k, v = _rows(q), _rows(k), _rows(v)
        if k.stride(0) != v.stride(0):
            k, v = k.contiguous(), v.contiguous()
        assert q.dtype == k.dtype == v.dtype
        assert q.dtype in _COMPUTED
        assert q.dtype == torch.bfloat16 or not self._call.is_paired
        assert self._call.is_fp8 or q.dtype == self._pool.tensor.dtype
        assert len(q) == len(k) == len(v) == self._calls[self._windows[layer]].num_tokens
        out = torch.empty(q.shape, dtype=q.dtype)
        call = self._calls[self._windows[layer]]
        place = self._places[layer]
        call.pool = self._pool.base_address + place.start * self._number_bytes
        call.head_stride = place.head_stride
        if call.spans:
            call.spans = self._call.spans + layer * call.layer_spans
        call.q, call.k, call.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.q_stride, call.kv_stride = q.stride(0), k.stride(0)
        call.out, call.is_bf16 = out.data_ptr(), q.dtype == torch.bfloat16
        if sinks is not None:
            assert sinks.dtype == torch.float32
            assert sinks.is_contiguous()
        call.sinks = None if sinks is None else sinks.data_ptr()
        self._attend(ctypes.byref(call))
        return out

    def _plan_last(self, segments: Sequence[Segment], num_tokens: int) -> None:
        """Plan the last layer of the current batch, in which only the wanted tokens attend."""
        wanted = array("q", [segment.wanted_len for segment in segments])
        num_wanted = sum(wanted)
        self._last_call = None
        if num_wanted < num_tokens:
            call = self._plan_call
            call.wanted, call.slots, call.window = _address(wanted), None, self._windows[-1] or 0
            self._last_plan.fill(self._divide, call)
            self._last_call = self._call_for(call, num_wanted)

    def _call_for(self, planned: _PlanCall, num_tokens: int) -> _Call:
        if planned.num_partials > self._partials.numel():
            self._partials = torch.empty(planned.num_partials)
        call = _Call.from_buffer_copy(self._call)
        call.slots, call.tables, call.num_tokens = planned.slots, planned.tables, num_tokens
        call.units, call.num_units = planned.units, planned.num_units
        call.merges, call.num_merges = planned.merges, planned.num_merges
        call.window, call.num_threads = planned.window, planned.num_threads
        return call


def supports(dtype: str, head_dim: int) -> bool:
    """Whether the CPU kernel supports a pool of this dtype and head size."""
    return dtype in ("float32", "bfloat16", FP8) and head_dim % 2 == 0


def orders_for(layout: KvLayout, library: ctypes.CDLL) -> tuple[str, ...]:
    """The block orders that the kernels support for bf16 queries, fastest first."""
    in_groups = layout.block_size % _GROUP == 0 and layout.head_dim % _GROUP == 0
    if layout.dtype not in ("bfloat16", FP8) or not in_groups or not library.baton_has_linear():
        return (TOKENS,)
    if layout.dtype == FP8 or layout.head_dim % _QUAD_DIMS:
        return PAIRS, TOKENS
    return SPLIT, PAIRS, TOKENS


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """`heads` [N, heads, head_dim] with each token's heads contiguous, at any token stride."""
    _, num_heads, head_dim = heads.shape
    in_pieces = heads.stride(2) == 1 and (num_heads == 1 or heads.stride(1) == head_dim)
    return heads if in_pieces else heads.contiguous()
