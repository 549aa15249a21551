"""Latent attention: keys and values of all heads are products of one vector per token (DeepSeek V2,
https://arxiv.org/abs/2405.04434).

A layer leaves this vector in the KV pool: the normed latent, and the rotated part of the keys that
all heads share. The attention backend decides by the number of queries whether keys and values are
computed from the latents or queries are turned into queries of latents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.latents import UpProjection
from engine.checkpoint.latent_config import LatentConfig
from engine.checkpoint.layer_tensors import KindWeights, LayerTensor, Rows, Split
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.quantized_blocks import as_tensor
from engine.layers.attention_pass import AttentionPass
from engine.layers.linear import LinearFactory, LinearLayer

_NORM_EPS = 1e-6
"""The eps of the norms of latents, whatever the model's other norms have."""


class LatentAttention:
    """One layer's attention, from normed inputs to the sum with the residual."""

    def __init__(self, config: ModelConfig, weights: KindWeights, make: LinearFactory) -> None:
        self._config = _latent(config)
        self._num_heads = config.num_heads
        matrices, vectors = weights.matrices, weights.vectors
        names = ("q",) if self._config.q_lora_rank is None else ("q_a", "q_b")
        self._q = [make.linear(matrices.pop(each), vectors.get(f"{each}_bias")) for each in names]
        self._kv = make.linear(matrices.pop("kv_a"), vectors.get("kv_a_bias"))
        self._q_norm, self._kv_norm = vectors.get("q_a_norm"), vectors["kv_a_norm"]
        up = _up_weight(self._config, config.num_heads, weights)
        self._kv_b = make.linear(up.flatten(0, 1), None)
        self._up = UpProjection(up, self._config.qk_nope_head_dim, self._kv_b)
        self._o = make.output_linear(matrices.pop("o"), vectors.get("o_bias"))

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        """See Kind."""
        latent, hidden = _latent(config), config.hidden_size
        q_rows = config.num_heads * latent.qk_head_dim
        if latent.q_lora_rank is None:
            found = [LayerTensor("q", [Rows("q_proj.weight", q_rows)], hidden, Split.OUTPUTS)]
        else:
            rank = latent.q_lora_rank
            found = [
                LayerTensor("q_a", [Rows("q_a_proj.weight", rank)], hidden),
                LayerTensor("q_a_norm", [Rows("q_a_layernorm.weight", rank)], is_wide=True),
                LayerTensor("q_b", [Rows("q_b_proj.weight", q_rows)], rank, Split.OUTPUTS),
            ]
        kv_a = [Rows("kv_a_proj_with_mqa.weight", latent.latent_dim)]
        kv_norm = [Rows("kv_a_layernorm.weight", latent.kv_lora_rank)]
        found += [
            LayerTensor("kv_a", kv_a, hidden),
            LayerTensor("kv_a_norm", kv_norm, is_wide=True),
        ]
        found += _up_tensors(latent, config.num_heads)
        o_inputs = config.num_heads * latent.v_head_dim
        found.append(LayerTensor("o", [Rows("o_proj.weight", hidden)], o_inputs, Split.INPUTS))
        return found + _biases(config, latent)

    @property
    def products(self) -> Sequence[LinearLayer]:
        """See AttentionLayer."""
        return *self._q, self._kv, self._kv_b, self._o

    def attend(self, x: torch.Tensor, layer: int, batch: AttentionPass) -> torch.Tensor:
        """See AttentionLayer."""
        rank, norm = self._config.kv_lora_rank, batch.ops.norm
        q = self._q[0](x)
        if self._q_norm is not None:
            q = self._q[1](norm(q, self._q_norm, _NORM_EPS))
        q = q.view(len(x), self._num_heads, self._config.qk_head_dim)
        kv = self._kv(x)
        rotated = torch.cat(
            (q[:, :, self._config.qk_nope_head_dim :], kv[:, None, rank:]), dim=1
        )  # [N, num_heads + 1, qk_rope_head_dim]
        if self._config.rope_interleave:
            rotated = rotated.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        rotated = batch.ops.rotate(rotated, None, batch.rotation)
        q = torch.cat((q[:, :, : self._config.qk_nope_head_dim], rotated[:, :-1]), dim=2)
        normed = norm(kv[:, :rank].contiguous(), self._kv_norm, _NORM_EPS)
        latents = torch.cat((normed, rotated[:, -1]), dim=1)
        return batch.latent.run_latents(layer, q, latents, self._up).flatten(1)

    def output(self, attended: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionLayer."""
        return self._o(attended, add=add)


def _latent(config: ModelConfig) -> LatentConfig:
    assert config.latent is not None
    return config.latent


def _up_tensors(latent: LatentConfig, num_heads: int) -> list[LayerTensor]:
    """The projection from latents to heads, as the files hold it."""
    rank, key_dim, value_dim = latent.kv_lora_rank, latent.qk_nope_head_dim, latent.v_head_dim
    if not latent.kv_b_in_parts:
        rows = [Rows("kv_b_proj.weight", num_heads * (key_dim + value_dim))]
        return [LayerTensor("kv_b", rows, rank, Split.OUTPUTS)]
    keys, values = num_heads * rank, num_heads * value_dim
    return [
        LayerTensor("k_b", [Rows("k_b_proj.weight", keys)], key_dim, Split.OUTPUTS),
        LayerTensor("v_b", [Rows("v_b_proj.weight", values)], rank, Split.OUTPUTS),
    ]


def _up_weight(config: LatentConfig, num_heads: int, weights: KindWeights) -> torch.Tensor:
    """The projection from latents to heads, [num_heads, qk_nope_head_dim + v_head_dim,
    kv_lora_rank]. Dequantized, because it is multiplied from either side once it is absorbed into
    queries."""
    device = weights.vectors["kv_a_norm"].device

    def heads(name: str) -> torch.Tensor:
        return as_tensor(weights.matrices.pop(name), device).unflatten(0, (num_heads, -1))

    if config.kv_b_in_parts:
        return torch.cat((heads("k_b").transpose(1, 2), heads("v_b")), dim=1)
    return heads("kv_b")


def _biases(config: ModelConfig, latent: LatentConfig) -> list[LayerTensor]:
    """The biases of products with the hidden state; `q_proj` never has one."""
    found = []
    if config.qkv_bias:
        if latent.q_lora_rank is not None:
            found.append(LayerTensor("q_a_bias", [Rows("q_a_proj.bias", latent.q_lora_rank)]))
        rows = [Rows("kv_a_proj_with_mqa.bias", latent.latent_dim)]
        found.append(LayerTensor("kv_a_bias", rows))
    if config.o_bias:
        rows = [Rows("o_proj.bias", config.hidden_size)]
        found.append(LayerTensor("o_bias", rows, split=Split.FIRST))
    return found
