"""The parts of a decoder, as the fused forms of a backend read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.layers.embedding import Embedding
from engine.layers.kinds import AttentionLayer, FeedForwardLayer
from engine.layers.linear import LinearLayer
from engine.layers.rope import Rope
from engine.layers.summed import Sums


@dataclass(frozen=True)
class Layer:
    """`x += attention(norm(x)); x += feed_forward(norm(x))`; norm weights are [hidden], fp32. A
    half's result is normed before it is added if the layer has such a norm."""

    input_norm: torch.Tensor
    attention: AttentionLayer
    post_norm: torch.Tensor | None  # None: there is no feed-forward half
    feed_forward: FeedForwardLayer
    attention_out_norm: torch.Tensor | None = None
    feed_forward_out_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class ModelParts:
    """All weights and operations of a pass, from tokens to logits."""

    config: ModelConfig
    embed: Embedding
    rope: Rope
    local_rope: Rope | None  # of layers with windows; None: `rope`
    layers: Sequence[Layer]
    final_norm: torch.Tensor  # [hidden], fp32
    lm_head: LinearLayer
    sums: Sums | None = None  # adds up with the ranks that have the other parts of each layer
