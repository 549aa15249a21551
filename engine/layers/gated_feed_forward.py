"""The dense feed-forward layer: `down(activation(gate(x)) * up(x))`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.checkpoint.layer_tensors import KindWeights, LayerTensor, Rows, Split
from engine.checkpoint.model_config import ModelConfig
from engine.layers.linear import LinearFactory, LinearLayer
from engine.layers.ops import LayerOps


class GatedFeedForward:
    """One layer's feed-forward half, from normed inputs to the sum with the residual."""

    def __init__(self, config: ModelConfig, weights: KindWeights, make: LinearFactory) -> None:
        matrices, vectors = weights.matrices, weights.vectors
        self.gate_up = make.linear(matrices.pop("gate_up"), vectors.get("gate_up_bias"))
        self.down = make.output_linear(matrices.pop("down"), vectors.get("down_bias"))

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        """See Kind. Rows of `gate_up` are gate's, then up's."""
        return dense_tensors(config, "gate_up", ("gate", "up"))

    @property
    def products(self) -> Sequence[LinearLayer]:
        """See FeedForwardLayer."""
        return self.gate_up, self.down

    def __call__(
        self, x: torch.Tensor, ops: LayerOps, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See FeedForwardLayer."""
        return self.down(ops.gate(self.gate_up(x)), add=add)


def dense_tensors(config: ModelConfig, name: str, parts: Sequence[str]) -> list[LayerTensor]:
    """The weights of a dense layer: `name`, with the rows of `parts` one after the other, then
    `down`; and their biases."""
    hidden, inner = config.hidden_size, config.intermediate_size

    def rows(kind: str) -> list[Rows]:
        return [Rows(f"{part}_proj.{kind}", inner) for part in parts]

    found = [
        LayerTensor(name, rows("weight"), hidden, Split.OUTPUTS),
        LayerTensor("down", [Rows("down_proj.weight", hidden)], inner, Split.INPUTS),
    ]
    if config.mlp_bias:
        bias = [Rows("down_proj.bias", hidden)]
        found.append(LayerTensor(f"{name}_bias", rows("bias"), split=Split.OUTPUTS))
        found.append(LayerTensor("down_bias", bias, split=Split.FIRST))
    return found
