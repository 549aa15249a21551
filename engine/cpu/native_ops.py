"""`LayerOps` with our own kernels, for bf16 on a CPU. Each kernel makes one pass over memory."""

from __future__ import annotations

import ctypes

import torch

from engine.layers.ops import Rotation, TorchOps
from engine.models.architectures import CLAMPED_SWIGLU

GATES = {"silu": 0, "gelu_new": 1, "gelu_fast": 1, "gelu_pytorch_tanh": 1, CLAMPED_SWIGLU: 2}
"""The activations of the kernels, as `Gate` in native/elementwise.h numbers them."""


class NativeOps:
    """`LayerOps` with the kernels in `library`, for bf16 on the CPU."""

    rotation_dtype = torch.float32

    def __init__(self, hidden_act: str, eps: float, library: ctypes.CDLL) -> None:
        self._library = library
        self._eps = eps
        self._gate = GATES.get(hidden_act)
        self._other_gate = TorchOps(hidden_act, eps, torch.bfloat16).gate

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float | None = None,
        add: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See LayerOps."""
        _check(x)
        _check(weight, torch.float32)
        out = torch.empty_like(x)
        rows, size = x.shape
        call = _Norm(x.data_ptr(), weight.data_ptr(), None, out.data_ptr(), rows, size)
        if add is not None:
            _check(add)
            assert add.shape == x.shape
            call.add = add.data_ptr()
        call.num_threads = torch.get_num_threads()
        call.eps = self._eps if eps is None else eps
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
            _check(weight, torch.float32)
            call.weight = weight.data_ptr()
        call.stride, call.num_heads, call.head_dim = heads.stride(0), num_heads, head_dim
        call.num_threads, call.eps = torch.get_num_threads(), self._eps
        self._library.baton_rotate(ctypes.byref(call))
        return heads

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        if self._gate is None:
            return self._other_gate(gate_up)
        _check(gate_up)
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size))
        call = _Gate(gate_up.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        call.gate = self._gate
        self._library.baton_gate(ctypes.byref(call))
        return out


def _check(tensor: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    """Check dtype and contiguity, because the kernels read raw memory."""
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()


class _Norm(ctypes.Structure):
    """Mirrors NormCall in native/elementwise.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "add", "out")),
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
        *((name, ctypes.c_int32) for name in ("size", "num_threads", "gate")),
    )
