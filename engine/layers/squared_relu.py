"""Feed-forward halves of Nemotron-H: `down(relu(up(x)) ** 2)`, and a half that computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.checkpoint.layer_tensors import KindWeights, LayerTensor
from engine.checkpoint.model_config import ModelConfig
from engine.layers.gated_feed_forward import dense_tensors
from engine.layers.linear import LinearFactory, LinearLayer
from engine.layers.ops import LayerOps


class SquaredRelu:
    """One layer's feed-forward half, from normed inputs to the sum with the residual."""

    def __init__(self, config: ModelConfig, weights: KindWeights, make: LinearFactory) -> None:
        matrices, vectors = weights.matrices, weights.vectors
        self._up = make.linear(matrices.pop("up"), vectors.get("up_bias"))
        self._down = make.output_linear(matrices.pop("down"), vectors.get("down_bias"))

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        """See Kind."""
        return dense_tensors(config, "up", ("up",))

    @property
    def products(self) -> Sequence[LinearLayer]:
        """See FeedForwardLayer."""
        return self._up, self._down

    def __call__(
        self, x: torch.Tensor, ops: LayerOps, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See FeedForwardLayer."""
        return self._down(self._up(x).relu_().square(), add=add)


class NoFeedForward:
    """The half of a layer that computes nothing; such a layer has no norm for it."""

    products: Sequence[LinearLayer] = ()

    def __init__(self, config: ModelConfig, weights: KindWeights, make: LinearFactory) -> None:
        pass

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        """See Kind."""
        return []

    def __call__(
        self, x: torch.Tensor, ops: LayerOps, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See FeedForwardLayer."""
        return torch.zeros_like(x) if add is None else add
