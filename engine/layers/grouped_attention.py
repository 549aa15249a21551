"""Attention of grouped queries: several query heads for each head of keys and values.

Biases, norms on q and k, and sinks are optional. The attention backend knows whether a layer
attends to all earlier tokens or to a window of them; the layer's computation is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.scaled_kv import KvScales
from engine.checkpoint.layer_tensors import KindWeights, LayerTensor, Rows, Split
from engine.checkpoint.model_config import ModelConfig
from engine.layers.attention_pass import AttentionPass
from engine.layers.linear import LinearFactory, LinearLayer


class GroupedAttention:
    """One layer's attention, from normed inputs to the sum with the residual.

    `qk_norm` holds the norms of q and k as one weight, a row per head:
    [num_heads + num_kv_heads, head_dim].
    """

    def __init__(self, config: ModelConfig, weights: KindWeights, make: LinearFactory) -> None:
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        matrices, vectors = weights.matrices, weights.vectors
        self.qkv = make.linear(matrices.pop("qkv"), vectors.get("qkv_bias"))
        self.qk_norm = _qk_norm(config, vectors) if config.qk_norm else None
        self.sinks = vectors.get("sinks")  # [num_heads], fp32
        self.kv_scales = KvScales.of(vectors, config.num_heads)
        self.o = make.output_linear(matrices.pop("o"), vectors.get("o_bias"))

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        """See Kind. Rows of `qkv` are q's, then k's, then v's."""
        hidden, head_dim = config.hidden_size, config.head_dim
        q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim

        def qkv(kind: str) -> list[Rows]:
            return [
                Rows(f"q_proj.{kind}", q_rows, config.num_heads),
                Rows(f"k_proj.{kind}", kv_rows, config.num_kv_heads),
                Rows(f"v_proj.{kind}", kv_rows),
            ]

        found = [
            LayerTensor("qkv", qkv("weight"), hidden, Split.OUTPUTS),
            LayerTensor("o", [Rows("o_proj.weight", hidden)], q_rows, Split.INPUTS),
        ]
        if config.qkv_bias:
            found.append(LayerTensor("qkv_bias", qkv("bias"), split=Split.OUTPUTS))
        if config.o_bias:
            found.append(LayerTensor("o_bias", [Rows("o_proj.bias", hidden)], split=Split.FIRST))
        if config.has_sinks:
            sinks = [Rows("sinks", config.num_heads)]
            found.append(LayerTensor("sinks", sinks, split=Split.OUTPUTS, is_wide=True))
        if config.qk_norm:
            found += [
                LayerTensor(
                    name,
                    [Rows(f"{name}.weight", head_dim)],
                    is_wide=True,
                    offset=config.norm_offset,
                )
                for name in ("q_norm", "k_norm")
            ]
        return found

    @property
    def products(self) -> Sequence[LinearLayer]:
        """See AttentionLayer."""
        return self.qkv, self.o

    def attend(self, x: torch.Tensor, layer: int, batch: AttentionPass) -> torch.Tensor:
        """See AttentionLayer."""
        qkv = self.qkv(x)
        heads = qkv.view(len(qkv), self._num_heads + 2 * self._num_kv_heads, self._head_dim)
        if batch.storing is not None and self.kv_scales is None:
            ops, backend = batch.storing
            q = ops.rotate_and_store(heads, self.qk_norm, batch.rotation, backend.target(layer))
            return backend.attend(layer, _scaled(q, batch.scale), self.sinks).flatten(1)
        qk, v = heads.split([self._num_heads + self._num_kv_heads, self._num_kv_heads], dim=1)
        qk = batch.ops.rotate(qk, self.qk_norm, batch.rotation)
        q, k = qk.split([self._num_heads, self._num_kv_heads], dim=1)
        q = _scaled(q, batch.scale)
        if self.kv_scales is None:
            return batch.grouped.run(layer, q, k, v, self.sinks).flatten(1)
        return self.kv_scales.run(batch.grouped, layer, q, k, v, self.sinks).flatten(1)

    def output(self, attended: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionLayer."""
        return self.o(attended, add=add)


def _scaled(q: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return q if scale is None else q * scale.to(q.dtype)


def _qk_norm(config: ModelConfig, vectors: dict[str, torch.Tensor]) -> torch.Tensor:
    q, k = vectors["q_norm"], vectors["k_norm"]  # [head_dim]
    return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))
