"""Linear layers, and those that torch multiplies; backends have faster ones (`engine.backend`).

On a CPU the weight is reordered once into oneDNN's blocked layout, if oneDNN multiplies bf16 there;
if not, it is widened to fp32 piece by piece for many rows. Otherwise torch multiplies by the
original weight. Keeps one copy of the weight in every case. Knows nothing of the model around it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch.nn.functional import linear

from engine.checkpoint.quantized_blocks import Matrix


class LinearLayer(Protocol):
    """`x @ weight.T + bias`, for any storage of the weight."""

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, inputs] to [N, outputs], plus `add` [N, outputs] where given; N may be 0."""

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute `x` [N, inputs] to [N, outputs] in fp32. The result is written to `out` if it is
        given."""


class LinearFactory(Protocol):
    """Makes the linear layers of a model's layers."""

    def linear(self, weight: Matrix, bias: torch.Tensor | None) -> LinearLayer:
        """The layer for `weight` [outputs, inputs] and `bias` [outputs] or None. May pack the
        weight: drop your reference to `weight` to free it."""

    def output_linear(self, weight: Matrix, bias: torch.Tensor | None) -> LinearLayer:
        """Like `linear`, for a layer whose inputs may be split over ranks. Its outputs are
        whole."""


def torch_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearLayer:
    """torch's fastest layer for `weight` [outputs, inputs] and `bias` [outputs] or None.

    May pack the weight: drop your reference to `weight` to free the original.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and not has_bf16_products():
        return WidenedLinear(weight, bias)
    return TorchLinear(weight, bias)


def has_bf16_products() -> bool:
    """Whether oneDNN multiplies bf16 on this CPU; on x86 this needs AVX-512."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class StackedLinear:
    """Layers with the same inputs, whose outputs follow one another."""

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        self._layers = layers

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, inputs] to [N, outputs], plus `add` [N, outputs] where given; N may be 0."""
        y = torch.cat([layer(x) for layer in self._layers], dim=1)
        return y if add is None else add + y

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product in fp32; written to `out` where given."""
        y = torch.cat([layer.in_float32(x) for layer in self._layers], dim=1)
        return y if out is None else out.copy_(y)


class TorchLinear:
    """Multiplies with oneDNN or torch. `weight` [outputs, inputs], `bias` [outputs] or None.

    Keeps `weight` itself only if it is not packed; if it is, drop your reference to free it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._num_outputs = len(weight)
        self._bias = bias
        self.is_packed = _can_reorder(weight)
        self._weight = _pack(weight) if self.is_packed else weight

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, inputs] to [N, outputs], plus `add` [N, outputs] where given; N may be 0.

        On a card the sum may overwrite `add`.
        """
        if add is not None and self._bias is None and x.device.type == "cuda":
            return add.addmm_(x, self._weight.t())  # one kernel: adds before it rounds
        if not self.is_packed:
            y = linear(x, self._weight, self._bias)
            return y if add is None else add + y
        if len(x) == 0:  # oneDNN does not support empty products
            return x.new_empty((0, self._num_outputs))
        if add is None:
            return _packed_linear(x, self._weight, self._bias, "none", [], "")
        return _packed_linear_add(x, add, self._weight, self._bias, "add")

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product, rounded to its dtype, as fp32; written to `out` where given."""
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

    torch's bf16 product there takes as long for each of many rows as for a single row. For more
    than a few rows, pieces of the weight that fit in cache are widened to fp32 and multiplied, and
    the sums are rounded once. Keeps `weight` itself.
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
        """The product in fp32, rounded to bf16 first for few rows; written to `out` where given."""
        if out is None:
            out = x.new_empty((len(x), len(self._weight)), dtype=torch.float32)
        if len(x) <= _MOST_NARROW_ROWS:
            return out.copy_(self(x))
        for outputs, sums in self._pieces(x):
            out[:, outputs] = sums
        return out

    def _pieces(self, x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Slices of outputs with their fp32 sums [N, outputs in the slice]; the caller may change
        the sums."""
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
"""Up to this many rows, torch's bf16 product is faster; measured on two cores with AVX2."""
_NUMBERS_PER_PIECE = 1 << 20
"""4 MiB of fp32."""

_scratch = threading.local()


def _widened(numbers: int) -> torch.Tensor:
    """This thread's scratch memory for at least `numbers` fp32 numbers, until its next call."""
    found: torch.Tensor | None = getattr(_scratch, "widened", None)
    if found is None or len(found) < numbers:
        with torch.inference_mode(False):  # an inference tensor is writable in that mode only
            found = _scratch.widened = torch.empty(numbers)
    return found
