"""Weights as integers of 8 bits with a scale for each output and group of inputs.

Weight-only: inputs and sums keep their precision, so only the rounding of the weights loses
accuracy. Symmetric, with rounding to nearest. Pure arithmetic; the kernel defines the layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP_INPUTS = 64
_LARGEST = 127


@dataclass(frozen=True)
class QuantizedWeight:
    """`values` [outputs, inputs], int8, times `scales` [outputs, inputs / 64], fp32."""

    values: torch.Tensor
    scales: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """The values of the integers, [outputs, inputs], fp32."""
        return self.values.float() * self.scales.repeat_interleave(GROUP_INPUTS, dim=1)


def quantize(weight: torch.Tensor) -> QuantizedWeight:
    """`weight` [outputs, inputs] in 8 bits; inputs must be whole groups of 64.

    A weight that is not finite makes its group's scale NaN, so that the logits show the fault.
    """
    outputs, inputs = weight.shape
    assert inputs % GROUP_INPUTS == 0, inputs
    groups = weight.float().view(outputs, -1, GROUP_INPUTS)
    scales = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / _LARGEST
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    values = (groups / scales).round_().clamp_(-_LARGEST, _LARGEST).nan_to_num_().to(torch.int8)
    return QuantizedWeight(values.view(outputs, inputs), scales.squeeze(-1))
