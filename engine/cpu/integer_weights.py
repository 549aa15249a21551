"""Weights as small integers with a scale for each output and group of inputs.

Weight-only: inputs and sums keep their precision, so only the rounding of the weights loses
accuracy. Symmetric, with rounding to nearest. For 4 bits, each group tries a few scales and takes
the one with the least squared error. Pure arithmetic; the kernel defines the layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP_INPUTS = 64
_LARGEST = {8: 127, 4: 7}
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Clipping points to try, as shares of a group's largest weight. Clipping the largest weight can
make the others more accurate."""


@dataclass(frozen=True)
class QuantizedWeight:
    """`values` [outputs, inputs], int8, times `scales` [outputs, inputs / 64], fp32."""

    values: torch.Tensor
    scales: torch.Tensor
    bits: int

    def dequantized(self) -> torch.Tensor:
        """The values of the integers, [outputs, inputs], fp32."""
        return self.values.float() * self.scales.repeat_interleave(GROUP_INPUTS, dim=1)


def quantize(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """`weight` [outputs, inputs] in `bits` (8 or 4); inputs must be whole groups of 64.

    A weight that is not finite makes its group's scale NaN, so that the logits show the fault.
    """
    outputs, inputs = weight.shape
    assert inputs % GROUP_INPUTS == 0, inputs
    groups = weight.float().view(outputs, -1, GROUP_INPUTS)
    largest = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    shares = _SHARES if bits == 4 else (1.0,)
    best = torch.full_like(largest, torch.inf)
    values = torch.zeros(groups.shape, dtype=torch.int8)
    scales = torch.full_like(largest, torch.nan)  # remains NaN where the error is NaN
    for share in shares:
        scale = largest * (share / _LARGEST[bits])
        rounded = (groups / scale).round_().clamp_(-_LARGEST[bits] - 1, _LARGEST[bits])
        error = (rounded * scale - groups).square_().sum(dim=-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, scale, scales)
        values = torch.where(better, rounded.to(torch.int8), values)
    return QuantizedWeight(values.view(outputs, inputs), scales.squeeze(-1), bits)
