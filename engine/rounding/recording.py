"""A backend whose products keep their inputs, for a model or a part of one in bf16 on a CPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

from engine.checkpoint.experts_config import ExpertsConfig
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.quantized_blocks import BlockMatrix, Matrix, as_tensor
from engine.cpu.backend import MORE_BITS, CpuBackend
from engine.layers.embedding import Embedding
from engine.layers.experts import ExpertWeights, activated, of_shared
from engine.layers.linear import LinearLayer, TorchLinear
from engine.layers.ops import LayerOps
from engine.layers.routing import choose
from engine.models.parts import ModelParts

_BITS = 4


@dataclass
class RecordingLinear:
    """A linear layer by `own` that keeps its inputs. `weight` [outputs, inputs] is to be rounded to
    `bits`. Without `own` its results, which nobody needs, are empty."""

    weight: torch.Tensor
    bits: int
    own: LinearLayer | None
    inputs: list[torch.Tensor] = field(default_factory=list)  # [N, inputs] each

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """See LinearLayer."""
        assert self.own is not None
        self.inputs.append(x)
        return self.own(x, add)

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See LinearLayer."""
        self.inputs.append(x)
        return x.new_empty(len(x), 0) if self.own is None else self.own.in_float32(x, out)


class GivenStates:
    """In place of an embedding: the hidden states of the tokens, which the layers before have
    computed."""

    def __init__(self) -> None:
        self.states = torch.empty(0)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[N, hidden]."""
        assert len(token_ids) == len(self.states)
        return self.states


class RecordingBackend(CpuBackend):
    """A CpuBackend whose linear layers record; `layers` are all of them. `given` are the hidden
    states that the part of a model begins with if it has no embedding."""

    def __init__(self, config: ModelConfig, kernels: ctypes.CDLL) -> None:
        super().__init__(config, "bfloat16", kernels)
        self.layers: list[RecordingLinear] = []
        self.given = GivenStates()

    def linear(self, weight: Matrix, bias: torch.Tensor | None) -> LinearLayer:
        """See Backend."""
        return self._recording(weight, _BITS, super().linear(weight, bias))

    def output_linear(self, weight: Matrix, bias: torch.Tensor | None) -> LinearLayer:
        """See Backend."""
        return self._recording(weight, MORE_BITS[_BITS], super().output_linear(weight, bias))

    def logits_linear(self, weight: Matrix) -> LinearLayer:
        """See Backend; logits are not computed."""
        if not self._config.gives_logits:
            return TorchLinear(torch.empty(0, 0))
        return self._recording(weight, MORE_BITS[_BITS], None)

    def experts(self, config: ExpertsConfig, weights: ExpertWeights) -> RecordingExperts:
        """See LayerFactory."""
        return RecordingExperts(config, weights, self)

    def embedding(self, weight: torch.Tensor | BlockMatrix) -> Embedding:
        """See Backend."""
        return super().embedding(weight) if self._config.embeds else self.given

    def fuse(self, parts: ModelParts) -> None:
        """See Backend; layers run one by one."""

    def _recording(self, weight: Matrix, bits: int, own: LinearLayer | None) -> RecordingLinear:
        self.layers.append(RecordingLinear(as_tensor(weight), bits, own))
        return self.layers[-1]


class RecordingExperts:
    """See Experts; expert by expert, each of two recording layers."""

    def __init__(
        self, config: ExpertsConfig, weights: ExpertWeights, backend: RecordingBackend
    ) -> None:
        def made(matrices: list[Matrix], biases: list[torch.Tensor]) -> list[LinearLayer]:
            return [
                backend.linear(matrix, biases[expert] if biases else None)
                for expert, matrix in enumerate(matrices)
            ]

        self._config, self._weights = config, weights
        self._gate_up = made(weights.gate_up, weights.gate_up_bias)
        self._down = made(weights.down, weights.down_bias)
        self._shared: tuple[LinearLayer, LinearLayer] | None = None
        if weights.shared_gate_up is not None:
            assert weights.shared_down is not None
            both = weights.shared_gate_up, weights.shared_down
            self._shared = backend.linear(both[0], None), backend.linear(both[1], None)
        self.tally = torch.zeros(3, dtype=torch.int64)

    @property
    def products(self) -> list[LinearLayer]:
        """See Experts."""
        return [*self._gate_up, *self._down, *(self._shared or ())]

    def __call__(self, x: torch.Tensor, ops: LayerOps, add: torch.Tensor | None) -> torch.Tensor:
        """See Experts."""
        weights = self._weights
        logits = linear(x.float(), weights.router, weights.router_bias)
        chosen, shares = choose(self._config, logits, weights.choice_bias)
        y = torch.zeros(x.shape)
        for expert, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            if len(rows):
                found = down(activated(self._config, gate_up(x[rows]), ops))
                y.index_add_(0, rows, found.float() * shares[rows, places, None])
        out = y.to(x.dtype)
        if self._shared is not None:
            out = out + of_shared(self._config, self._shared, weights.shared_gate, x, ops)
        return out if add is None else add + out
