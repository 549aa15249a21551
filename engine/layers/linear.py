"""A linear layer whose weight lies as its device reads it fastest.

On a CPU the weight is reordered once: for our own kernel where there is one (see
native_linear.py), else into oneDNN's blocked layout where it multiplies bf16. Without either it is
widened to fp32 piece by piece for many rows. On a card it may become fp8 (see gpu/fp8_linear.py).
Elsewhere it stays as it is and torch multiplies. Owns that choice; knows nothing of the model
around it. Holds one copy of the weight, whichever it is.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Protocol

import torch
from torch.nn.functional import linear

from engine.cpu.huge_pages import HugePages
from engine.cpu.native_linear import NativeLinear, can_pack
from engine.gpu.fp8_linear import Fp8Linear, can_scale


class LinearLayer(Protocol):
    """`x @ weight.T + bias`, however the weight is kept."""

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, inputs] to [N, outputs], plus `add` [N, outputs] where given; N may be 0."""

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The same in fp32, without `add`; written to `out` [N, outputs], fp32, where given."""


def linear_layer(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    kernels: ctypes.CDLL | None = None,
    bits: int = 16,
    memory: HugePages | None = None,
) -> LinearLayer:
    """The fastest there is for `weight` [outputs, inputs] and `bias` [outputs] or None.

    With 12 `bits` the kernels keep the same numbers in fewer (see engine.cpu.native_linear), with 8
    and 4 they round the weight to integers (see engine.cpu.quantization); without kernels 8 bits
    are fp8, for weights whose sizes its product takes.

    Drop your reference to `weight` to free it where the layer packs it; the kernels' copy lies in
    `memory`.
    """
    if kernels is not None and can_pack(kernels, weight):
        return NativeLinear(weight, bias, kernels, bits, memory)
    if kernels is None and bits == 8 and can_scale(weight):
        return Fp8Linear(weight, bias)
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and not has_bf16_products():
        return WidenedLinear(weight, bias)
    return TorchLinear(weight, bias)


def has_bf16_products() -> bool:
    """Whether oneDNN multiplies bf16 on this CPU: with AVX-512, on x86."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class TorchLinear:
    """By oneDNN or torch. `weight` [outputs, inputs], `bias` [outputs] or None.

    Keeps `weight` itself only where it is not packed: drop your reference to free it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._num_outputs = len(weight)
        self._bias = bias
        self.is_packed = _can_reorder(weight)
        self._weight = _pack(weight) if self.is_packed else weight

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, inputs] to [N, outputs], plus `add` [N, outputs] where given; N may be 0.

        On a card the sum may be written to `add`, whose value is then spent.
        """
        if add is not None and self._bias is None and x.device.type == "cuda":
            return add.addmm_(x, self._weight.t())  # summed before it is rounded, in one kernel
        if not self.is_packed:
            y = linear(x, self._weight, self._bias)
            return y if add is None else add + y
        if len(x) == 0:  # oneDNN has no products of nothing
            return x.new_empty((0, self._num_outputs))
        if add is None:
            return _packed_linear(x, self._weight, self._bias, "none", [], "")
        return _packed_linear_add(x, add, self._weight, self._bias, "add")

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product, as its dtype rounds it, in fp32; written to `out` where given."""
        y = self(x)
        return y.to(torch.float32) if out is None else out.copy_(y)


_packed_linear = torch.ops.mkldnn._linear_pointwise.default
_packed_linear_add = torch.ops.mkldnn._linear_pointwise.binary


def _can_reorder(weight: torch.Tensor) -> bool:
    is_bf16 = weight.dtype == torch.bfloat16
    return weight.device.type == "cpu" and is_bf16 and has_bf16_products()


@torch.inference_mode()
def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


class WidenedLinear:
    """For a CPU without bf16 products. `weight` [outputs, inputs], `bias` [outputs] or None, bf16.

    torch's bf16 product there takes as long for each of many rows as for one. From a few rows on
    pieces of the weight that stay in cache are widened to fp32, multiplied and rounded once.
    Keeps `weight` itself.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, inputs] to [N, outputs], plus `add` [N, outputs] where given; N may be 0."""
        if len(x) <= _MOST_NARROW_ROWS:
            y = linear(x, self._weight, self._bias)
            return y if add is None else add + y
        y = x.new_empty((len(x), len(self._weight)))
        for outputs, sums in self._pieces(x):
            y[:, outputs] = sums if add is None else sums.add_(add[:, outputs])
        return y

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product in fp32, of few rows as bf16 rounds it; written to `out` where given."""
        if out is None:
            out = x.new_empty((len(x), len(self._weight)), dtype=torch.float32)
        if len(x) <= _MOST_NARROW_ROWS:
            return out.copy_(self(x))
        for outputs, sums in self._pieces(x):
            out[:, outputs] = sums
        return out

    def _pieces(self, x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Outputs with their sums in fp32, [N, outputs of the piece], the caller's to change."""
        x, (num_outputs, inputs) = x.float(), self._weight.shape
        widened = _widened(max(_NUMBERS_PER_PIECE, inputs))
        step = len(widened) // inputs
        for begin in range(0, num_outputs, step):
            outputs = slice(begin, min(begin + step, num_outputs))
            narrow = self._weight[outputs]
            wide = widened[: narrow.numel()].view_as(narrow).copy_(narrow)
            if self._bias is None:
                yield outputs, x @ wide.t()
            else:
                yield outputs, torch.addmm(self._bias[outputs].float(), x, wide.t())


_MOST_NARROW_ROWS = 4
"""Up to here bf16 is read once and multiplied row by row; measured on two cores with AVX2."""
_NUMBERS_PER_PIECE = 1 << 20
"""4 MiB of fp32."""

_scratch = threading.local()


def _widened(numbers: int) -> torch.Tensor:
    """Memory for so many fp32 numbers, and perhaps more: this thread's, until the next call."""
    found: torch.Tensor | None = getattr(_scratch, "widened", None)
    if found is None or len(found) < numbers:
        with torch.inference_mode(False):  # else it could be written to in that mode alone
            found = _scratch.widened = torch.empty(numbers)
    return found
