"""The feed-forward layer of a mixture: a router chooses some of many experts for each token.

`engine.layers.experts` and backends compute; this file knows which tensors a layer consists of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.checkpoint.experts_config import ExpertsConfig
from engine.checkpoint.layer_tensors import KindWeights, LayerTensor, Rows, Split
from engine.checkpoint.model_config import ModelConfig
from engine.layers.experts import ExpertWeights, LayerFactory
from engine.layers.linear import LinearLayer
from engine.layers.ops import LayerOps


class ExpertsFeedForward:
    """One layer's feed-forward half, from normed inputs to the sum with the residual."""

    def __init__(self, config: ModelConfig, weights: KindWeights, make: LayerFactory) -> None:
        assert config.experts is not None
        matrices, vectors = weights.matrices, weights.vectors
        numbers = range(config.experts.count)
        has_biases = config.experts.has_biases
        found = ExpertWeights(
            vectors["router"],
            vectors.get("choice_bias"),
            [matrices.pop(_gate_up(expert)) for expert in numbers],
            [matrices.pop(_down(expert)) for expert in numbers],
            matrices.pop("shared_gate_up", None),
            matrices.pop("shared_down", None),
            vectors.get("shared_gate"),
            vectors.get("router_bias"),
            [vectors[f"{_gate_up(each)}_bias"] for each in numbers] if has_biases else [],
            [vectors[f"{_down(each)}_bias"] for each in numbers] if has_biases else [],
        )
        self.experts = make.experts(config.experts, found)

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        """See Kind. Each expert's matrices are weights of their own; rows of a `gate_up` are
        gate's, then up's, or up's alone."""
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None
        router = experts.router_name
        rows = [Rows(f"{router}.weight", experts.count)]
        found = [LayerTensor("router", rows, hidden, is_wide=True)]
        if experts.has_biases:
            rows = [Rows(f"{router}.bias", experts.count)]
            found.append(LayerTensor("router_bias", rows, is_wide=True))
        if experts.has_choice_bias:
            bias = [Rows("gate.e_score_correction_bias", experts.count)]
            found.append(LayerTensor("choice_bias", bias, is_wide=True))
        for number in range(experts.count):
            names = (_gate_up(number), _down(number))
            found += _products(experts, names, f"experts.{number}", hidden, experts.inner)
            if experts.has_biases:
                found += _biases(names, f"experts.{number}", hidden, experts.inner)
        if experts.shared_inner:
            names, shared = ("shared_gate_up", "shared_down"), experts.shared_name
            found += _products(experts, names, shared, hidden, experts.shared_inner)
            if experts.gates_shared:
                rows = [Rows(f"{shared}_gate.weight", 1)]
                found.append(LayerTensor("shared_gate", rows, hidden, is_wide=True))
        return found

    @property
    def products(self) -> Sequence[LinearLayer]:
        """See FeedForwardLayer."""
        return self.experts.products

    def __call__(
        self, x: torch.Tensor, ops: LayerOps, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See FeedForwardLayer."""
        return self.experts(x, ops, add)


def _gate_up(expert: int) -> str:
    return f"gate_up.{expert}"


def _down(expert: int) -> str:
    return f"down.{expert}"


def _products(
    experts: ExpertsConfig, names: tuple[str, str], prefix: str, hidden: int, inner: int
) -> list[LayerTensor]:
    """The two weights of one expert."""
    parts = ("gate", "up") if experts.are_gated else ("up",)
    gate_up = [Rows(f"{prefix}.{part}_proj.weight", inner) for part in parts]
    down = [Rows(f"{prefix}.down_proj.weight", hidden)]
    return [
        LayerTensor(names[0], gate_up, hidden, Split.OUTPUTS),
        LayerTensor(names[1], down, inner, Split.INPUTS),
    ]


def _biases(names: tuple[str, str], prefix: str, hidden: int, inner: int) -> list[LayerTensor]:
    """The biases of these two weights."""
    gate_up = [Rows(f"{prefix}.{part}_proj.bias", inner) for part in ("gate", "up")]
    down = [Rows(f"{prefix}.down_proj.bias", hidden)]
    return [
        LayerTensor(f"{names[0]}_bias", gate_up, split=Split.OUTPUTS),
        LayerTensor(f"{names[1]}_bias", down, split=Split.FIRST),
    ]
