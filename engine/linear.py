"""A linear layer whose weight lies as its device reads it fastest.

On a CPU with bf16 products the weight is reordered once into oneDNN's blocked layout: streamed at
the bandwidth of memory for a few rows, and near the cores' peak for many. Elsewhere it stays
as it is and torch multiplies. Owns that choice; knows nothing of the model around it. Holds one
copy of the weight, whichever it is.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear


class Linear:
    """`x @ weight.T + bias`; `weight` [outputs, inputs], `bias` [outputs] or None.

    Keeps `weight` itself only where it is not packed: drop your reference to free it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._num_outputs = len(weight)
        self._bias = bias
        self.is_packed = _can_pack(weight)
        self._weight = _pack(weight) if self.is_packed else weight

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, inputs] to [N, outputs], plus `add` [N, outputs] where given; N may be 0."""
        if not self.is_packed:
            y = linear(x, self._weight, self._bias)
            return y if add is None else add + y
        if len(x) == 0:  # oneDNN has no products of nothing
            return x.new_empty((0, self._num_outputs))
        if add is None:
            return _packed_linear(x, self._weight, self._bias, "none", [], "")
        return _packed_linear_add(x, add, self._weight, self._bias, "add")


_packed_linear = torch.ops.mkldnn._linear_pointwise.default
_packed_linear_add = torch.ops.mkldnn._linear_pointwise.binary


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@torch.inference_mode()
def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed
