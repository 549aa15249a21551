"""Attention of grouped queries: several query heads for each head of keys and values.

Biases and norms on q and k are optional. Whether a layer attends to all earlier tokens or to a
window of them, the attention backend knows; the layer computes alike.
"""

from __future__ import annotations

import torch

from engine.checkpoint.config import ModelConfig
from engine.checkpoint.weights import LayerWeights
from engine.layers.attention_pass import AttentionPass
from engine.layers.linear import LinearFactory


class GroupedAttention:
    """One layer's attention, from normed inputs to the sum with the residual.

    `qk_norm` holds the norms of q and k as one weight, a row per head:
    [num_heads + num_kv_heads, head_dim].
    """

    def __init__(self, config: ModelConfig, weights: LayerWeights, make: LinearFactory) -> None:
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self.qkv = make.linear(weights.qkv, weights.qkv_bias)
        self.qk_norm = _qk_norm(config, weights)
        self.o = make.output_linear(weights.o, weights.o_bias)

    def attend(self, x: torch.Tensor, layer: int, batch: AttentionPass) -> torch.Tensor:
        """`x` [N, hidden] to the heads' results, [N, num_heads * head_dim]; `layer` is the layer's
        number in the pool, which gets the keys and values."""
        qkv = self.qkv(x)
        heads = qkv.view(len(qkv), self._num_heads + 2 * self._num_kv_heads, self._head_dim)
        if batch.storing is not None:
            ops, backend = batch.storing
            q = ops.rotate_and_store(heads, self.qk_norm, batch.rotation, backend.target(layer))
            return backend.attend(layer, _scaled(q, batch.scale)).flatten(1)
        qk, v = heads.split([self._num_heads + self._num_kv_heads, self._num_kv_heads], dim=1)
        qk = batch.ops.rotate(qk, self.qk_norm, batch.rotation)
        q, k = qk.split([self._num_heads, self._num_kv_heads], dim=1)
        return batch.backend.run(layer, _scaled(q, batch.scale), k, v).flatten(1)

    def output(self, attended: torch.Tensor, add: torch.Tensor) -> torch.Tensor:
        """Of results of `attend`, all or some rows: [N, hidden], plus `add`."""
        return self.o(attended, add=add)


def _scaled(q: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return q if scale is None else q * scale.to(q.dtype)


def _qk_norm(config: ModelConfig, weights: LayerWeights) -> torch.Tensor | None:
    if weights.q_norm is None or weights.k_norm is None:
        return None
    norms = (weights.q_norm, config.num_heads), (weights.k_norm, config.num_kv_heads)
    return torch.cat([norm.expand(num_heads, -1) for norm, num_heads in norms])
