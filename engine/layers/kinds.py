"""The kinds of attention and feed-forward that a layer may be made of, one file each.

`engine.models.architectures` says which layers are of which kind. To add a kind, write its class
and add a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from engine.checkpoint.layer_tensors import KindWeights, LayerTensor
from engine.checkpoint.model_config import ModelConfig
from engine.layers.attention_pass import AttentionPass
from engine.layers.experts import LayerFactory
from engine.layers.experts_feed_forward import ExpertsFeedForward
from engine.layers.gated_feed_forward import GatedFeedForward
from engine.layers.grouped_attention import GroupedAttention
from engine.layers.latent_attention import LatentAttention
from engine.layers.linear import LinearLayer
from engine.layers.ops import LayerOps
from engine.layers.output_gated_attention import OutputGatedAttention
from engine.layers.recurrent.gated_delta import GatedDelta, GatedDeltaByHead, GatedDeltaGatesByHead
from engine.layers.recurrent.mamba2 import Mamba2
from engine.layers.squared_relu import NoFeedForward, SquaredRelu
from engine.layers.unrotated_attention import UnrotatedAttention


class AttentionLayer(Protocol):
    """One layer's attention."""

    @property
    def products(self) -> Sequence[LinearLayer]:
        """Every part of the layer that multiplies by weights."""

    def attend(self, x: torch.Tensor, layer: int, batch: AttentionPass) -> torch.Tensor:
        """Compute normed `x` [N, hidden] to what `output` takes, [N, ...]. Stores what the batch's
        tokens leave in the KV pool. `layer` is the layer's number there."""

    def output(self, attended: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """Compute all or some rows of `attend`'s result to [N, hidden], plus `add` if it is
        given."""


class FeedForwardLayer(Protocol):
    """One layer's feed-forward half."""

    @property
    def products(self) -> Sequence[LinearLayer]:
        """Every part of the layer that multiplies by weights."""

    def __call__(
        self, x: torch.Tensor, ops: LayerOps, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute normed `x` [N, hidden] to [N, hidden], plus `add` if it is given."""


LayerT = TypeVar("LayerT")


@dataclass(frozen=True)
class Kind(Generic[LayerT]):
    """`tensors` gives the weights that a layer of this kind has in a model, or in a rank's share of
    one. `make` consumes them, so that no weight is in memory twice."""

    tensors: Callable[[ModelConfig], Sequence[LayerTensor]]
    make: Callable[[ModelConfig, KindWeights, LayerFactory], LayerT]


ATTENTION: dict[str, Kind[AttentionLayer]] = {
    "grouped": Kind(GroupedAttention.tensors, GroupedAttention),
    "latent": Kind(LatentAttention.tensors, LatentAttention),
    "output_gated": Kind(OutputGatedAttention.tensors, OutputGatedAttention),
    "unrotated": Kind(UnrotatedAttention.tensors, UnrotatedAttention),
    "mamba2": Kind(Mamba2.tensors, Mamba2),
    "gated_delta": Kind(GatedDelta.tensors, GatedDelta),
    "gated_delta_gates_by_head": Kind(GatedDeltaGatesByHead.tensors, GatedDeltaGatesByHead),
    "gated_delta_by_head": Kind(GatedDeltaByHead.tensors, GatedDeltaByHead),
}
FEED_FORWARD: dict[str, Kind[FeedForwardLayer]] = {
    "gated": Kind(GatedFeedForward.tensors, GatedFeedForward),
    "squared_relu": Kind(SquaredRelu.tensors, SquaredRelu),
    "none": Kind(NoFeedForward.tensors, NoFeedForward),
    "experts": Kind(ExpertsFeedForward.tensors, ExpertsFeedForward),
}
