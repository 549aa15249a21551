"""The data that the attention of all layers shares in one pass over a planned batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch

from engine.attention.base import AttentionBackend, GroupedBackend, StoringAttention
from engine.attention.groups import AttentionWithStates
from engine.attention.latents import LatentBackend
from engine.attention.states import LayerStates
from engine.layers.ops import LayerOps, Rotation, StoringOps


@dataclass(frozen=True)
class AttentionPass:
    """The planned batch, and the rotation of its tokens. Queries are multiplied by `scale`
    [N, 1, 1]. One kernel rotates and stores k and v if `storing` is there: if both the operations
    and the backend support it."""

    backend: AttentionBackend
    ops: LayerOps
    rotation: Rotation
    scale: torch.Tensor | None
    storing: tuple[StoringOps, StoringAttention] | None = field(init=False)

    def __post_init__(self) -> None:
        ops, backend = self.ops, self.backend
        both = isinstance(ops, StoringOps) and isinstance(backend, StoringAttention)
        object.__setattr__(self, "storing", (ops, backend) if both else None)

    @property
    def grouped(self) -> GroupedBackend:
        """The backend of a model whose attention is of grouped queries."""
        return cast(GroupedBackend, self.backend)

    @property
    def latent(self) -> LatentBackend:
        """The backend of a model whose attention is latent."""
        return cast(LatentBackend, self.backend)

    def states(self, layer: int) -> LayerStates:
        """The states of a layer that keeps one per sequence."""
        return cast(AttentionWithStates, self.backend).states(layer)
