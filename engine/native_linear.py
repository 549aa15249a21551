"""A bf16 linear layer by our own kernel: weights in panels that a core streams once.

An output is one chain of dot products in a fixed order: neither the other rows nor the number of
threads changes a row's result, bit for bit. Owns the packed weight; `native/linear.h` multiplies.
"""

from __future__ import annotations

import ctypes

import torch

PANEL_OUTPUTS = 64


class Weight(ctypes.Structure):
    """Mirrors LinearWeight in native/linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
        *((name, ctypes.c_int32) for name in ("inputs", "outputs")),
    )


class _Call(ctypes.Structure):
    """Mirrors LinearCall in native/linear.h."""

    _fields_ = (
        ("weight", Weight),
        *((name, ctypes.c_void_p) for name in ("x", "add", "out", "wide")),
        ("rows", ctypes.c_int64),
        ("num_threads", ctypes.c_int32),
    )


def can_pack(kernels: ctypes.CDLL | None, weight: torch.Tensor) -> bool:
    """Whether the kernel takes this `weight` [outputs, inputs]: bf16 on a CPU that multiplies it,
    an even number of inputs."""
    return (
        kernels is not None
        and bool(kernels.baton_has_linear())
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.shape[1] % 2 == 0
    )


class NativeLinear:
    """`x @ weight.T + bias`; `weight` [outputs, inputs], `bias` [outputs] or None, bf16.

    Keeps a packed copy of `weight`: drop your reference to free the original.
    """

    is_packed = True

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: ctypes.CDLL
    ) -> None:
        assert can_pack(kernels, weight)
        outputs, inputs = weight.shape
        panels = -(-outputs // PANEL_OUTPUTS)
        self._panels = torch.empty((panels, inputs // 2, PANEL_OUTPUTS), dtype=torch.int32)
        self._bias = None if bias is None else bias.contiguous()
        self._multiply = kernels.baton_linear
        whole = weight.contiguous()
        kernels.baton_pack(
            ctypes.c_void_p(whole.data_ptr()),
            ctypes.c_int32(inputs),
            ctypes.c_int32(outputs),
            ctypes.c_void_p(self._panels.data_ptr()),
        )
        self.weight = Weight(
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            inputs,
            outputs,
        )

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, inputs] to [N, outputs], plus `add` [N, outputs] where given; N may be 0."""
        out = x.new_empty((len(x), self.weight.outputs))
        self._run(x, add, out=out.data_ptr())
        return out

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The same, not rounded to bf16."""
        out = torch.empty((len(x), self.weight.outputs))
        self._run(x, None, wide=out.data_ptr())
        return out

    def _run(
        self,
        x: torch.Tensor,
        add: torch.Tensor | None,
        out: int | None = None,
        wide: int | None = None,
    ) -> None:
        assert x.dtype == torch.bfloat16
        assert x.shape[1] == self.weight.inputs
        x = x.contiguous()
        call = _Call(self.weight, x.data_ptr(), None, out, wide, len(x), torch.get_num_threads())
        if add is not None:
            assert add.shape == (len(x), self.weight.outputs)
            assert add.dtype == torch.bfloat16
            add = add.contiguous()
            call.add = add.data_ptr()
        self._multiply(ctypes.byref(call))
