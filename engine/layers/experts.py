"""The products of a layer's experts: the protocol for backends, and torch's form.

Owns the experts' weights. A token's rows of the products depend on its own experts only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn.functional import grouped_mm, linear

from engine.checkpoint.experts_config import ExpertsConfig
from engine.checkpoint.quantized_blocks import Matrix, as_tensor
from engine.layers.linear import LinearFactory, LinearLayer
from engine.layers.ops import LayerOps
from engine.layers.routing import choose
from protocol.errors import ConfigError

_ALIGNMENT = 8
"""Numbers of a row that the grouped product needs a multiple of."""


@dataclass
class ExpertWeights:
    """The weights of one layer of experts, or of a rank's share of each expert. The rows of each
    `gate_up` [2 * inner, hidden] are gate's, then up's; experts without gates have only up's,
    [inner, hidden]. Each `down` is [hidden, inner]. The shared expert's weights are there if the
    layer has one. Either all matrices have biases or none has. All weights except the matrices and
    their biases are fp32."""

    router: torch.Tensor  # [experts, hidden]
    choice_bias: torch.Tensor | None  # [experts]
    gate_up: list[Matrix]
    down: list[Matrix]
    shared_gate_up: Matrix | None = None
    shared_down: Matrix | None = None
    shared_gate: torch.Tensor | None = None  # [1, hidden]
    router_bias: torch.Tensor | None = None  # [experts]
    gate_up_bias: list[torch.Tensor] = field(default_factory=list)  # [2 * inner] each
    down_bias: list[torch.Tensor] = field(default_factory=list)  # [hidden] each


class Experts(Protocol):
    """The experts of one layer."""

    tally: torch.Tensor
    """The three totals of `ExpertLoads` so far, [3] int64; layers may share one."""

    @property
    def products(self) -> Sequence[LinearLayer]:
        """The linear layers among the products. Experts that have no linear layer of their own are
        left out."""

    def __call__(self, x: torch.Tensor, ops: LayerOps, add: torch.Tensor | None) -> torch.Tensor:
        """Normed `x` [N, hidden] to the sum of the chosen experts and the shared one, [N, hidden],
        plus `add` where given."""


class LayerFactory(LinearFactory, Protocol):
    """Makes the parts of a model's layers that multiply by weights; every backend is one."""

    def experts(self, config: ExpertsConfig, weights: ExpertWeights) -> Experts:
        """The experts of one layer. Consumes the matrices of `weights`. Raises ConfigError for what
        the backend does not multiply."""


MakeLinear = Callable[[Matrix, torch.Tensor | None], LinearLayer]


class TorchExperts:
    """See Experts; one grouped product over all experts, on any device. `linear_layer` makes the
    products of the shared expert. Consumes `weights`. Raises ConfigError for sizes that torch's
    grouped product does not take."""

    def __init__(
        self, config: ExpertsConfig, weights: ExpertWeights, linear_layer: MakeLinear
    ) -> None:
        self._config = config
        self._router, self._bias = weights.router, weights.choice_bias
        self._router_bias = weights.router_bias
        self._gate_up_bias = _rows(weights.gate_up_bias)  # [experts, 2 * inner]
        self._down_bias = _rows(weights.down_bias)  # [experts, hidden]
        self._gate_up = _stacked(weights.gate_up)  # [experts, 2 * inner, hidden]
        self._down = _stacked(weights.down)  # [experts, hidden, inner]
        self._shared: tuple[LinearLayer, LinearLayer] | None = None
        self._shared_gate = weights.shared_gate
        if weights.shared_gate_up is not None:
            assert weights.shared_down is not None
            gate_up, down = weights.shared_gate_up, weights.shared_down
            weights.shared_gate_up = weights.shared_down = None
            self._shared = linear_layer(gate_up, None), linear_layer(down, None)
        device = self._router.device
        self._numbers = torch.arange(config.count, device=device)
        self.tally = torch.zeros(3, dtype=torch.int64, device=device)

    @property
    def products(self) -> Sequence[LinearLayer]:
        """See Experts."""
        return self._shared or ()

    def __call__(self, x: torch.Tensor, ops: LayerOps, add: torch.Tensor | None) -> torch.Tensor:
        """See Experts."""
        y = self._routed(x, ops)
        if self._shared is not None:
            y = y + of_shared(self._config, self._shared, self._shared_gate, x, ops)
        return y if add is None else add + y

    def _routed(self, x: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        per_token = self._config.per_token
        logits = linear(x.float(), self._router, self._router_bias)
        chosen, weights = choose(self._config, logits, self._bias)
        experts, order = chosen.flatten().sort(stable=True)  # [N * per_token]: expert by expert
        ends = torch.searchsorted(experts, self._numbers, right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        self.tally += torch.stack((counts.sum(), counts.max(), (counts > 0).sum()))
        if not len(x):
            return torch.zeros_like(x)
        ends = ends.to(torch.int32)
        gate_up = grouped_mm(x[order // per_token], self._gate_up.transpose(1, 2), offs=ends)
        if self._gate_up_bias is not None:
            gate_up = gate_up + self._gate_up_bias[experts]
        hidden = activated(self._config, gate_up, ops)
        y = grouped_mm(hidden, self._down.transpose(1, 2), offs=ends)
        if self._down_bias is not None:
            y = y + self._down_bias[experts]
        y = y[order.argsort()].unflatten(0, (-1, per_token))  # [N, per_token, hidden]
        return torch.bmm(weights.unsqueeze(1).to(y.dtype), y).squeeze(1)


def of_shared(
    config: ExpertsConfig,
    layers: tuple[LinearLayer, LinearLayer],
    gate: torch.Tensor | None,
    x: torch.Tensor,
    ops: LayerOps,
) -> torch.Tensor:
    """The shared expert's result for normed `x` [N, hidden], by its two `layers`; `gate` [1,
    hidden], fp32."""
    gate_up, down = layers
    y = down(activated(config, gate_up(x), ops))
    return y if gate is None else y * linear(x.float(), gate).sigmoid().to(y.dtype)


def activated(config: ExpertsConfig, gate_up: torch.Tensor, ops: LayerOps) -> torch.Tensor:
    """An expert's inner numbers, from its first product."""
    return ops.gate(gate_up) if config.are_gated else gate_up.relu().square()


def _rows(biases: list[torch.Tensor]) -> torch.Tensor | None:
    """A row for each expert, [experts, outputs]; None if there are none."""
    return torch.stack(biases) if biases else None


def _stacked(matrices: list[Matrix]) -> torch.Tensor:
    """One tensor, [experts, outputs, inputs]; consumes `matrices`."""
    first = as_tensor(matrices[0])
    if first.shape[0] % _ALIGNMENT or first.shape[1] % _ALIGNMENT:
        raise ConfigError(
            f"torch multiplies experts whose sizes are multiples of {_ALIGNMENT}, not matrices of "
            f"{first.shape[0]} x {first.shape[1]}"
        )
    stacked = first.new_empty((len(matrices), *first.shape))
    for expert, place in enumerate(stacked):
        place.copy_(as_tensor(matrices[expert]))
        matrices[expert] = place
    return stacked
