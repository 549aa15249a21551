"""Attention of grouped queries without any rotary embedding: scores do not depend on the distance
of tokens (Nemotron-H, whose other layers know the order of tokens)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.scaled_kv import KvScales
from engine.checkpoint.layer_tensors import KindWeights, LayerTensor
from engine.checkpoint.model_config import ModelConfig
from engine.layers.attention_pass import AttentionPass
from engine.layers.grouped_attention import GroupedAttention
from engine.layers.linear import LinearFactory, LinearLayer


class UnrotatedAttention:
    """One layer's attention, from normed inputs to the sum with the residual."""

    def __init__(self, config: ModelConfig, weights: KindWeights, make: LinearFactory) -> None:
        self._counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        matrices, vectors = weights.matrices, weights.vectors
        self._qkv = make.linear(matrices.pop("qkv"), vectors.get("qkv_bias"))
        self._kv_scales = KvScales.of(vectors, config.num_heads)
        self._o = make.output_linear(matrices.pop("o"), vectors.get("o_bias"))

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        """See Kind."""
        return GroupedAttention.tensors(config)

    @property
    def products(self) -> Sequence[LinearLayer]:
        """See AttentionLayer."""
        return self._qkv, self._o

    def attend(self, x: torch.Tensor, layer: int, batch: AttentionPass) -> torch.Tensor:
        """See AttentionLayer."""
        heads = self._qkv(x).unflatten(1, (-1, self._head_dim))
        q, k, v = heads.split(self._counts, dim=1)
        if self._kv_scales is None:
            return batch.grouped.run(layer, q, k, v).flatten(1)
        return self._kv_scales.run(batch.grouped, layer, q, k, v).flatten(1)

    def output(self, attended: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionLayer."""
        return self._o(attended, add=add)
