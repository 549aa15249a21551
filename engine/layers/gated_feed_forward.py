"""The dense feed-forward layer: `down(activation(gate(x)) * up(x))`."""

from __future__ import annotations

import torch

from engine.checkpoint.weights import LayerWeights
from engine.layers.linear import LinearFactory
from engine.layers.ops import LayerOps


class GatedFeedForward:
    """One layer's feed-forward half, from normed inputs to the sum with the residual."""

    def __init__(self, weights: LayerWeights, make: LinearFactory) -> None:
        self.gate_up = make.linear(weights.gate_up, weights.gate_up_bias)
        self.down = make.output_linear(weights.down, weights.down_bias)

    def __call__(self, x: torch.Tensor, ops: LayerOps, add: torch.Tensor) -> torch.Tensor:
        """`x` [N, hidden] to [N, hidden], plus `add`."""
        return self.down(ops.gate(self.gate_up(x)), add=add)
