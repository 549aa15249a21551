"""A linear layer on a card whose result for a row does not depend on the other rows.

cuBLAS chooses a product's tiles, and with them the order of its sums, by the number of rows. Here
the tiles are fixed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Multiply = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor], None
]
"""A function like `engine.gpu.invariant_ops.multiply`."""


class InvariantLinear:
    """`x @ weight.T + bias`; `weight` [outputs, inputs], `bias` [outputs] or None, bf16 or fp16.
    Keeps `weight` itself."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, multiply: Multiply) -> None:
        self._weight = weight.contiguous()
        self._bias = bias
        self._multiply = multiply

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, inputs] to [N, outputs], plus `add` [N, outputs] where given; N may be 0.

        The sum overwrites `add`.
        """
        out = x.new_empty((len(x), len(self._weight))) if add is None else add
        self._multiply(x, self._weight, self._bias, add, out)
        return out

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The sums in fp32, not rounded; written to `out` where given."""
        if out is None:
            out = x.new_empty((len(x), len(self._weight)), dtype=torch.float32)
        self._multiply(x, self._weight, self._bias, None, out)
        return out
