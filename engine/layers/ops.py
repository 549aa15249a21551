"""The operations between a layer's matrix products: norms, rotary embedding, the gate.

`TorchOps` uses torch operations, on any device and dtype. `NativeOps` uses our own kernels for bf16
on a CPU, one pass each. `engine.gpu.ops` has the operations for a card. All compute in fp32 and
round to the model's dtype. Knows nothing of layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch.nn.functional import gelu, silu

from engine.attention.base import KvTarget
from engine.layers.rope import rotate

_tanh_gelu = partial(gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
}
Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [N, head_dim / 2]."""


class LayerOps(Protocol):
    """The operations of one model, in its dtype."""

    rotation_dtype: torch.dtype
    """The dtype that `rotate` expects for cos and sin."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the rows of `x` [N, size], scaled by `weight` [size]."""

    def rotate(
        self, heads: torch.Tensor, weight: torch.Tensor | None, rotation: Rotation
    ) -> torch.Tensor:
        """`heads` [N, num_heads, head_dim] rotated. With `weight` [num_heads, head_dim], each head
        is first normed with its row of the weight. May change `heads` in place."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The activation of the first half of `gate_up` [N, 2 * size] times the second half."""


@runtime_checkable
class StoringOps(LayerOps, Protocol):
    """Operations that rotate k on its way into the pool."""

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        weight: torch.Tensor | None,
        rotation: Rotation,
        target: KvTarget,
    ) -> torch.Tensor:
        """Rotates q in place and returns it, [N, num_heads, head_dim]; stores the rotated k and
        the v in `target`.

        `heads` is [N, num_heads + 2 * num_kv_heads, head_dim], contiguous. With `weight`
        [num_heads + num_kv_heads, head_dim], the heads of q and k are normed first.
        """


class TorchOps:
    """`LayerOps` in torch, with the model's `hidden_act` and RMSNorm's `eps`."""

    def __init__(self, hidden_act: str, eps: float, dtype: torch.dtype) -> None:
        self.rotation_dtype = dtype
        self._activation = _ACTIVATIONS[hidden_act]
        self._eps = eps

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See LayerOps; `x` may have more dimensions."""
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (wide * scale).to(x.dtype) * weight

    def rotate(
        self, heads: torch.Tensor, weight: torch.Tensor | None, rotation: Rotation
    ) -> torch.Tensor:
        """See LayerOps."""
        if weight is not None:
            heads = self.norm(heads, weight)
        return rotate(heads, *rotation)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self._activation(gate) * up


class NativeOps:
    """`LayerOps` with the kernels in `library`, for bf16 on the CPU."""

    rotation_dtype = torch.float32

    def __init__(self, hidden_act: str, eps: float, library: ctypes.CDLL) -> None:
        self._library = library
        self._eps = eps
        self._other_gate = (
            None if hidden_act == "silu" else TorchOps(hidden_act, eps, torch.bfloat16).gate
        )

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        _check(x, weight)
        out = torch.empty_like(x)
        rows, size = x.shape
        call = _Norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size)
        call.num_threads, call.eps = torch.get_num_threads(), self._eps
        self._library.baton_rms_norm(ctypes.byref(call))
        return out

    def rotate(
        self, heads: torch.Tensor, weight: torch.Tensor | None, rotation: Rotation
    ) -> torch.Tensor:
        """See LayerOps; in place."""
        cos, sin = rotation
        num_tokens, num_heads, head_dim = heads.shape
        assert heads.dtype == torch.bfloat16
        assert heads.stride()[1:] == (head_dim, 1)
        assert cos.dtype == sin.dtype == torch.float32
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        call = _Rotation(heads.data_ptr(), None, cos.data_ptr(), sin.data_ptr(), num_tokens)
        if weight is not None:
            _check(weight)
            call.weight = weight.data_ptr()
        call.stride, call.num_heads, call.head_dim = heads.stride(0), num_heads, head_dim
        call.num_threads, call.eps = torch.get_num_threads(), self._eps
        self._library.baton_rotate(ctypes.byref(call))
        return heads

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        if self._other_gate is not None:
            return self._other_gate(gate_up)
        _check(gate_up)
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size))
        call = _Gate(gate_up.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        self._library.baton_gate(ctypes.byref(call))
        return out


def _check(*tensors: torch.Tensor) -> None:
    """Check dtype and contiguity, because the kernels read raw memory."""
    for tensor in tensors:
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous()


class _Norm(ctypes.Structure):
    """Mirrors NormCall in native/elementwise.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("size", "num_threads")),
        ("eps", ctypes.c_float),
    )


class _Rotation(ctypes.Structure):
    """Mirrors RotationCall in native/elementwise.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("heads", "weight", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("tokens", "stride")),
        *((name, ctypes.c_int32) for name in ("num_heads", "head_dim", "num_threads")),
        ("eps", ctypes.c_float),
    )


class _Gate(ctypes.Structure):
    """Mirrors GateCall in native/elementwise.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "out")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("size", "num_threads")),
    )
