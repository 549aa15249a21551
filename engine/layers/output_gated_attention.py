"""Attention of grouped queries with a gate for each query head (Qwen3-Next, Qwen3.5). The output of
a head's attention is multiplied by the sigmoid of its gate.

The heads of q and k are normed, and their first `rope_dim` numbers are rotated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.scaled_kv import KvScales
from engine.checkpoint.layer_tensors import KindWeights, LayerTensor, Rows, Split
from engine.checkpoint.model_config import ModelConfig
from engine.layers.attention_pass import AttentionPass
from engine.layers.linear import LinearFactory, LinearLayer


class OutputGatedAttention:
    """One layer's attention, from normed inputs to the sum with the residual."""

    def __init__(self, config: ModelConfig, weights: KindWeights, make: LinearFactory) -> None:
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim, self._rope_dim = config.head_dim, config.rope_dim
        matrices, vectors = weights.matrices, weights.vectors
        self._qkv = make.linear(matrices.pop("qkv"), vectors.get("qkv_bias"))
        self._q_norm, self._k_norm = vectors["q_norm"], vectors["k_norm"]  # [head_dim]
        self._kv_scales = KvScales.of(vectors, config.num_heads)
        self._o = make.output_linear(matrices.pop("o"), vectors.get("o_bias"))

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        """See Kind. The rows of `qkv` are, in order: for each query head the rows of its query and
        of its gate, then the rows of k, then those of v."""
        hidden, head_dim = config.hidden_size, config.head_dim
        q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim

        def qkv(kind: str) -> list[Rows]:
            sizes = {"q": 2 * q_rows, "k": kv_rows, "v": kv_rows}
            return [Rows(f"{name}_proj.{kind}", count) for name, count in sizes.items()]

        found = [
            LayerTensor("qkv", qkv("weight"), hidden, Split.OUTPUTS),
            LayerTensor("o", [Rows("o_proj.weight", hidden)], q_rows, Split.INPUTS),
        ]
        if config.qkv_bias:
            found.append(LayerTensor("qkv_bias", qkv("bias"), split=Split.OUTPUTS))
        if config.o_bias:
            found.append(LayerTensor("o_bias", [Rows("o_proj.bias", hidden)], split=Split.FIRST))
        for name in ("q_norm", "k_norm"):
            rows = [Rows(f"{name}.weight", head_dim)]
            found.append(LayerTensor(name, rows, is_wide=True, offset=config.norm_offset))
        return found

    @property
    def products(self) -> Sequence[LinearLayer]:
        """See AttentionLayer."""
        return self._qkv, self._o

    def attend(self, x: torch.Tensor, layer: int, batch: AttentionPass) -> torch.Tensor:
        """See AttentionLayer."""
        num_heads, num_kv_heads, head_dim = self._num_heads, self._num_kv_heads, self._head_dim
        widths = [2 * num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        q_gate, k, v = self._qkv(x).split(widths, dim=1)
        q, gate = q_gate.unflatten(1, (num_heads, 2, head_dim)).unbind(2)
        q = self._normed(q, self._q_norm, batch)
        k = self._normed(k.unflatten(1, (num_kv_heads, head_dim)), self._k_norm, batch)
        qk = torch.cat((q, k), dim=1)
        if self._rope_dim == head_dim:
            qk = batch.ops.rotate(qk, None, batch.rotation)
        else:
            rotated = qk[:, :, : self._rope_dim].contiguous()
            rotated = batch.ops.rotate(rotated, None, batch.rotation)
            qk = torch.cat((rotated, qk[:, :, self._rope_dim :]), dim=2)
        q, k = qk.split([num_heads, num_kv_heads], dim=1)
        v = v.unflatten(1, (num_kv_heads, head_dim))
        if self._kv_scales is None:
            attended = batch.grouped.run(layer, q, k, v)
        else:
            attended = self._kv_scales.run(batch.grouped, layer, q, k, v)
        return (attended * gate.sigmoid()).flatten(1)

    def output(self, attended: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionLayer."""
        return self._o(attended, add=add)

    def _normed(
        self, heads: torch.Tensor, weight: torch.Tensor, batch: AttentionPass
    ) -> torch.Tensor:
        """`heads` [N, num_heads, head_dim], each normed."""
        return batch.ops.norm(heads.flatten(0, 1).contiguous(), weight).view(heads.shape)
