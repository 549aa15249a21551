"""All layers of a bf16 model on a CPU in one call of our kernels.

Between the products of a step nothing is allocated and no Python runs: at small batches that is
worth a fifth of the step. Computes what the loop in model.py does, stage by stage. Owns the
memory that the stages pass on; `native/forward.h` computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.cpu_backend import KernelAttention
from engine.huge_pages import HugePages
from engine.native_linear import NativeLinear, Weight


class _Layer(ctypes.Structure):
    """Mirrors LayerWeights in native/forward.h."""

    _fields_ = (
        *((name, Weight) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "qk_norm")),
        ("attention", ctypes.c_int64),
    )


class _Forward(ctypes.Structure):
    """Mirrors ForwardCall in native/forward.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "attention", "last", "wanted")),
        *((name, ctypes.c_void_p) for name in ("x", "normed", "qkv", "heads", "gate_up", "gated")),
        *((name, ctypes.c_void_p) for name in ("positions", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("tokens", "num_wanted")),
        *((name, ctypes.c_int64) for name in ("num_layers", "layer_bytes")),
        ("num_threads", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True)
class FusedLayer:
    """One layer's packed products and norms' weights; `qk_norm` as in model.py."""

    qkv: NativeLinear
    o: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qk_norm: torch.Tensor | None


class FusedLayers:
    """The layers of one model, for `KernelAttention`; used by one thread."""

    def __init__(
        self,
        layers: Sequence[FusedLayer],
        windows: Sequence[int | None],
        eps: float,
        kernels: ctypes.CDLL,
    ) -> None:
        self._layers = tuple(layers)  # their tensors' memory is what `_structs` points to
        self._windows = sorted(set(windows), key=lambda window: window or 0)
        self._structs = (_Layer * len(layers))(
            *(
                _Layer(
                    layer.qkv.weight,
                    layer.o.weight,
                    layer.gate_up.weight,
                    layer.down.weight,
                    _address(layer.input_norm),
                    _address(layer.post_norm),
                    None if layer.qk_norm is None else _address(layer.qk_norm),
                    self._windows.index(window),
                )
                for layer, window in zip(layers, windows, strict=True)
            )
        )
        first = layers[0]
        self._widths = (
            first.qkv.weight.inputs,
            first.qkv.weight.outputs,
            first.o.weight.inputs,
            first.gate_up.weight.outputs,
            first.down.weight.inputs,
        )
        self._eps = eps
        self._run = kernels.baton_layers
        self._between: tuple[torch.Tensor, ...] = ()

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        attention: KernelAttention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x` [N, hidden] after all layers, its `rows` [W] int64 alone where given: those that the
        planned segments want. Changes `x`.

        `tables` are cos and sin in fp32, [P, head_dim / 2], which `positions` [N] int64 look up.
        """
        cos, sin = tables
        last = attention.planned_last if rows is not None else None
        num_wanted = len(x) if rows is None else len(rows)
        assert last is None or last.num_tokens == num_wanted
        assert x.dtype == torch.bfloat16
        assert cos.dtype == sin.dtype == torch.float32
        assert positions.dtype == torch.int64
        assert len(positions) == len(x)
        assert min(len(cos), len(sin)) >= attention.longest
        for tensor in (x, positions, cos, sin):
            assert tensor.is_contiguous()
        plans = (ctypes.c_void_p * len(self._windows))(
            *(ctypes.addressof(attention.planned(window)) for window in self._windows)
        )
        call = _Forward(
            ctypes.addressof(self._structs),
            ctypes.addressof(plans),
            None if last is None else ctypes.addressof(last),
            None if rows is None else rows.data_ptr(),
            x.data_ptr(),
            *(tensor.data_ptr() for tensor in self._memory(len(x))),
            positions.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            len(x),
            num_wanted,
            len(self._layers),
            attention.layer_bytes,
            torch.get_num_threads(),
            self._eps,
        )
        self._run(ctypes.byref(call))
        return x[:num_wanted]

    def _memory(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """What the stages write, kept for the next step: as large as the largest step so far."""
        if not self._between or len(self._between[0]) < num_tokens:
            memory = HugePages()
            self._between = tuple(
                memory.empty((num_tokens, width), torch.bfloat16) for width in self._widths
            )
        return self._between


def _address(weight: torch.Tensor) -> int:
    assert weight.dtype == torch.bfloat16
    assert weight.is_contiguous()
    return weight.data_ptr()
