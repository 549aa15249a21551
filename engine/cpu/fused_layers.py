"""Runs all layers of a bf16 model on a CPU in one call of our kernels.

Between a step's matrix products nothing is allocated and no Python runs, which saves a fifth of the
step at small batches. Computes the same stages as the loop in models/decoder.py. Owns the buffers
between the stages; `native/forward.h` computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.groups import FusedAttention
from engine.cpu.huge_pages import HugePages
from engine.cpu.native_experts import MemoryAddresses, NativeExperts
from engine.cpu.native_linear import NativeLinear, Weight
from engine.layers.summed import Sums


class _Layer(ctypes.Structure):
    """Mirrors LayerWeights in native/forward.h."""

    _fields_ = (
        *((name, Weight) for name in ("qkv", "o", "gate_up", "down")),
        ("experts", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "qk_norm")),
        *(
            (name, ctypes.c_void_p)
            for name in ("sinks", "attention_out_norm", "feed_forward_out_norm")
        ),
        *((name, ctypes.c_int64) for name in ("attention", "pool_layer", "pool_start")),
        *((name, ctypes.c_int64) for name in ("head_stride", "rope")),
    )


class Forward(ctypes.Structure):
    """Mirrors ForwardCall in native/forward.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "attention", "last", "wanted")),
        *((name, ctypes.c_void_p) for name in ("x", "normed", "qkv", "heads", "gate_up", "gated")),
        ("experts", MemoryAddresses),
        ("positions", ctypes.c_void_p),
        *((name, ctypes.c_void_p * 2) for name in ("cos", "sin")),
        *((name, ctypes.c_int64) for name in ("tokens", "num_wanted")),
        ("num_layers", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_threads", "gate")),
        ("eps", ctypes.c_float),
        ("ranks", ctypes.c_void_p),
    )


Tables = tuple[torch.Tensor, torch.Tensor]
"""cos and sin in fp32, [P, head_dim / 2], by position."""


@dataclass(frozen=True)
class FusedLayer:
    """One layer's packed linear layers, and its norm weights and sinks, fp32; `qk_norm` as in
    `GroupedAttention`. The feed-forward layer is one of gate and up and one of down, or a mixture
    of experts. `rope`: which of two rotary embeddings is the layer's."""

    qkv: NativeLinear
    o: NativeLinear
    feed_forward: tuple[NativeLinear, NativeLinear] | NativeExperts
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qk_norm: torch.Tensor | None
    attention_out_norm: torch.Tensor | None = None
    feed_forward_out_norm: torch.Tensor | None = None
    rope: int = 0
    sinks: torch.Tensor | None = None


class FusedLayers:
    """The layers of one model, with our kernels' attention; used by one thread."""

    def __init__(
        self,
        layers: Sequence[FusedLayer],
        eps: float,
        kernels: ctypes.CDLL,
        gate: int = 0,
        sums: Sums | None = None,
    ) -> None:
        """`sums` are of the ranks that have the other parts of each layer, if there are any."""
        self._sums = sums
        self._layers = tuple(layers)  # keeps the tensors alive that `_structs` points to
        self._structs = (_Layer * len(layers))(*(_struct(layer) for layer in layers))
        self._placed_in: FusedAttention | None = None
        halves = [layer.feed_forward for layer in layers]
        dense = [half for half in halves if not isinstance(half, NativeExperts)]
        mixtures = [half for half in halves if isinstance(half, NativeExperts)]
        first = layers[0]
        self._widths = (
            first.qkv.weight.inputs,  # x, then normed
            first.qkv.weight.inputs,
            first.qkv.weight.outputs,
            first.o.weight.inputs,
            dense[0][0].weight.outputs if dense else 0,
            dense[0][1].weight.inputs if dense else 0,
        )
        self._experts_memory = mixtures[0].memory if mixtures else None
        self._eps, self._gate = eps, gate
        self._run = kernels.baton_layers
        self._between: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._most_tokens = 0

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        tables: Sequence[Tables],
        attention: FusedAttention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run all layers on `x` [N, hidden] in place. Returns `x`, or only its `rows` [W] int64,
        the wanted rows of the planned segments.

        `tables`, one or two, are indexed by the layer's `rope`, then by `positions` [N] int64.
        """
        assert x.dtype == torch.bfloat16
        assert positions.dtype == torch.int64
        assert len(positions) == len(x)
        assert rows is None or rows.dtype == torch.int64
        for tensor in (x, positions, rows):
            assert tensor is None or tensor.is_contiguous()
        wanted = None if rows is None else (rows.data_ptr(), len(rows))
        at = positions.data_ptr()
        call = self.prepare(len(x), at, wanted, tables, attention, x.data_ptr())
        self._run(ctypes.byref(call))
        self.check()
        return x[: call.num_wanted]

    def prepare(
        self,
        num_tokens: int,
        positions: int,
        wanted: tuple[int, int] | None,
        tables: Sequence[Tables],
        attention: FusedAttention,
        x: int | None = None,
    ) -> Forward:
        """The kernels' call structure for a batch of N tokens, valid until the next call.

        `positions` is the address of [N] int64; `wanted` is the address and number of the wanted
        rows, int64, or None for all; `x` is the address of [N, hidden] bf16, or None to use a
        buffer of this object.
        """
        last = attention.planned_last if wanted is not None else None
        address, num_wanted = (None, num_tokens) if wanted is None else wanted
        assert last is None or last.num_tokens == num_wanted
        for table in (part for both in tables for part in both):
            assert table.dtype == torch.float32
            assert table.is_contiguous()
            assert len(table) >= attention.longest
        if self._placed_in is not attention:
            self._place_in(attention)
        addresses = [ctypes.addressof(plan) for plan in attention.plans]
        plans = (ctypes.c_void_p * len(addresses))(*addresses)
        own, *between = self._memory(num_tokens)
        call = Forward(
            ctypes.addressof(self._structs),
            ctypes.addressof(plans),
            None if last is None else ctypes.addressof(last),
            address,
            own if x is None else x,
            *between,
            MemoryAddresses()
            if self._experts_memory is None
            else self._experts_memory.of(num_tokens),
            positions,
            *(
                (ctypes.c_void_p * 2)(*(part.data_ptr() for part in parts))
                for parts in zip(*tables, strict=True)
            ),
            num_tokens,
            num_wanted,
            len(self._layers),
            torch.get_num_threads(),
            self._gate,
            self._eps,
            None if self._sums is None else self._sums.address,
        )
        call.plans = plans  # the address alone would not keep the array alive
        return call

    def check(self) -> None:
        """Raise RuntimeError if the ranks' parts could not be added up."""
        if self._sums is not None:
            self._sums.check()

    def _place_in(self, attention: FusedAttention) -> None:
        """Note where the layers' plans and parts of the pool are."""
        for layer, struct in enumerate(self._structs):
            place = attention.place(layer)
            struct.attention, struct.pool_layer = place.plan, place.pool_layer
            struct.pool_start, struct.head_stride = place.pool_start, place.head_stride
        self._placed_in = attention

    def _memory(self, num_tokens: int) -> list[int]:
        """Addresses of the stages' buffers, reused by the next step; they fit the largest step so
        far."""
        if num_tokens > self._most_tokens:
            memory = HugePages()
            self._between = [
                memory.empty((num_tokens, width), torch.bfloat16) for width in self._widths
            ]
            self._most_tokens = num_tokens
            self._addresses = [tensor.data_ptr() for tensor in self._between]
        return self._addresses


def _struct(layer: FusedLayer) -> _Layer:
    struct = _Layer(
        layer.qkv.weight,
        layer.o.weight,
        input_norm=_address(layer.input_norm),
        post_norm=_address(layer.post_norm),
        qk_norm=_address(layer.qk_norm),
        sinks=_address(layer.sinks),
        attention_out_norm=_address(layer.attention_out_norm),
        feed_forward_out_norm=_address(layer.feed_forward_out_norm),
        rope=layer.rope,
    )
    if isinstance(layer.feed_forward, NativeExperts):
        struct.experts = ctypes.addressof(layer.feed_forward.weights)
    else:
        gate_up, down = layer.feed_forward
        struct.gate_up, struct.down = gate_up.weight, down.weight
    return struct


def _address(weight: torch.Tensor | None) -> int | None:
    if weight is None:
        return None
    assert weight.dtype == torch.float32
    assert weight.is_contiguous()
    return weight.data_ptr()
