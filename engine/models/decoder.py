"""One decoder for every supported architecture: Llama, Mistral, Qwen2, Qwen3.

They share the structure `x += attention(norm(x)); x += mlp(norm(x))`; `ModelConfig` and the weights
define the differences (biases, norms on q and k, tied embeddings, rotary kind). Owns the arithmetic
of a forward pass; knows nothing of sequences or blocks, which the attention backend plans before
the pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch.nn.functional import embedding

from engine.attention.base import AttentionBackend, StoringAttention
from engine.attention.cpu_backend import KernelAttention
from engine.checkpoint.blocks import BlockMatrix
from engine.checkpoint.config import ModelConfig
from engine.checkpoint.weights import LayerWeights, Weights
from engine.cpu.block_panels import BlockEmbedding
from engine.cpu.fused_layers import FusedLayer, FusedLayers
from engine.cpu.fused_step import Ends, FusedStep
from engine.cpu.huge_pages import HugePages
from engine.cpu.native_linear import NativeLinear
from engine.layers.linear import LinearLayer, MakeLinear, linear_layer
from engine.layers.ops import LayerOps, NativeOps, Rotation, StoringOps, TorchOps
from engine.layers.rope import Rope, query_scale


class RunnableModel(Protocol):
    """The model interface that a runner uses; see DecoderModel."""

    config: ModelConfig
    device: torch.device

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layers' output for the tokens at `rows` [W] (None: for all), [W, hidden]."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab], fp32, of hidden states [R, hidden]."""


class _Layer:
    """One decoder layer: its linear layers and norm weights."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        linear: MakeLinear,
    ) -> None:
        self.input_norm = weights.input_norm  # [H]
        self.qkv = linear(weights.qkv, weights.qkv_bias)
        self.qk_norm = _qk_norm(config, weights)
        self.o = linear(weights.o, weights.o_bias)
        self.post_norm = weights.post_norm  # [H]
        self.gate_up = linear(weights.gate_up, weights.gate_up_bias)
        self.down = linear(weights.down, weights.down_bias)


class DecoderModel:
    """A model ready to run, on the device and in the dtype of its weights.

    Consumes `weights` while packing them, so that no layer is in memory twice: `weights.layers` is
    empty afterwards. With `kernels` (see engine.native), a bf16 model on a CPU uses the kernels for
    the small operations; a card uses `ops`, where given; otherwise torch computes them. With
    `weight_bits` 12 the kernels store the same values in fewer bits; 8 and 4 round the weights of
    all products to integers, but lm_head to at least 8 bits. Without kernels, 8 bits means fp8, and
    lm_head is not rounded. `linear`, where given, makes all linear layers instead.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: ctypes.CDLL | None = None,
        weight_bits: int = 16,
        ops: LayerOps | None = None,
        linear: MakeLinear | None = None,
    ) -> None:
        self.config = config
        self.device = weights.final_norm.device
        self.dtype = weights.final_norm.dtype
        self._embed = _embedding(weights.embed, kernels)
        self._final_norm = weights.final_norm
        weights.layers.reverse()
        self._layers = []
        packed = partial(linear_layer, kernels=kernels, memory=HugePages())
        while weights.layers:
            make = linear or partial(packed, bits=weight_bits)
            self._layers.append(_Layer(config, weights.layers.pop(), make))
        logits_bits = 16 if kernels is None else max(weight_bits, 8)
        self._lm_head = (linear or partial(packed, bits=logits_bits))(weights.lm_head, None)
        self._rope = Rope(config.rope, config.head_dim, self.device)
        self._ops = ops or _layer_ops(config, self.device, self.dtype, kernels)
        self._kernels = kernels
        self._fused = _fuse(config, self._layers, kernels)

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of a weight as our kernels read it, scales included, on average; None if other
        products read some."""
        layers = [self._lm_head]
        for layer in self._layers:
            layers += (layer.qkv, layer.o, layer.gate_up, layer.down)
        packed = [each for each in layers if isinstance(each, NativeLinear)]
        if len(packed) < len(layers):
            return None
        return 8 * sum(each.num_bytes for each in packed) / sum(each.count for each in packed)

    def wrap_outputs(self, wrap: Callable[[LinearLayer], LinearLayer]) -> None:
        """Wrap the linear layers that end each half layer, o and down, with `wrap`."""
        for layer in self._layers:
            layer.o, layer.down = wrap(layer.o), wrap(layer.down)
        self._fused = None  # the fused layers would bypass the wrappers

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        logits_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [R, vocab], fp32, of the tokens at `logits_rows` [R] (None: of all).

        Equals `hidden` of all tokens followed by `logits` of these rows.
        """
        x = self.hidden(token_ids, positions, attention)
        return self.logits(x if logits_rows is None else x.index_select(0, logits_rows))

    @torch.inference_mode()
    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layers' output for the tokens at `rows` [W] int64 (None: for all), [W, hidden].

        `token_ids` and `positions` are [N], in the order of the segments that `attention` was
        planned with; `rows` are their `wanted_rows`. If W is 0, the pass only fills the KV pool.
        For other tokens, the last layer computes only the key and the value.
        """
        if isinstance(self._embed, BlockEmbedding):
            x = self._embed(token_ids)  # [N, hidden]
        else:
            x = embedding(token_ids, self._embed)
        if self._fused is not None and isinstance(attention, KernelAttention):
            tables = self._rope.tables(attention.longest)
            return self._fused(x, positions, tables, attention, rows)
        rotation = self._rope.cos_sin(positions, self._ops.rotation_dtype)
        scale = query_scale(self.config.rope, positions)
        return self._run_layers(x, self._attend_with(attention, rotation, scale), rows)

    @torch.inference_mode()
    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, vocab], fp32, of hidden states [R, hidden]; written to `out` where given."""
        return self._lm_head.in_float32(self._ops.norm(x, self._final_norm), out)

    def fused_step(self, attention: AttentionBackend) -> FusedStep | None:
        """The whole step as one call of the kernels, over this backend's pool; None if the kernels
        do not support this model."""
        if self._fused is None or not isinstance(attention, KernelAttention):
            return None
        assert isinstance(self._lm_head, NativeLinear)
        assert self._kernels is not None
        ends = Ends(self._embed, self._final_norm, self._lm_head)
        return FusedStep(ends, self._fused, self._rope, attention, self._kernels)

    def _run_layers(
        self, x: torch.Tensor, attend: _Attend, rows: torch.Tensor | None
    ) -> torch.Tensor:
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._ops.norm(x, layer.input_norm))
            attended = attend(index, layer, self._heads(qkv)).flatten(1)
            if rows is not None and layer is self._layers[-1]:
                attended, x = attended.index_select(0, rows), x.index_select(0, rows)
                if not len(rows):
                    break
            x = layer.o(attended, add=x)
            gate_up = layer.gate_up(self._ops.norm(x, layer.post_norm))
            x = layer.down(self._ops.gate(gate_up), add=x)
        return x

    def _heads(self, qkv: torch.Tensor) -> torch.Tensor:
        """q's heads, then k's, then v's: [N, num_heads + 2 * num_kv_heads, head_dim]."""
        num_heads = self.config.num_heads + 2 * self.config.num_kv_heads
        return qkv.view(len(qkv), num_heads, self.config.head_dim)

    def _attend_with(
        self, attention: AttentionBackend, rotation: Rotation, scale: torch.Tensor | None
    ) -> _Attend:
        """Attention with rotation, from heads [N, ...] to [N, num_heads, head_dim]. Queries are
        multiplied by `scale` [N, 1, 1]. One kernel rotates and stores k and v if both the
        operations and the backend support this."""
        ops = self._ops
        if isinstance(ops, StoringOps) and isinstance(attention, StoringAttention):

            def attend_stored(index: int, layer: _Layer, heads: torch.Tensor) -> torch.Tensor:
                target = attention.target(index)
                q = ops.rotate_and_store(heads, layer.qk_norm, rotation, target)
                return attention.attend(index, _scaled(q, scale))

            return attend_stored
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads

        def attend(index: int, layer: _Layer, heads: torch.Tensor) -> torch.Tensor:
            qk, v = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
            qk = ops.rotate(qk, layer.qk_norm, rotation)
            q, k = torch.split(qk, [num_heads, num_kv_heads], dim=1)
            return attention.run(index, _scaled(q, scale), k, v)

        return attend


def _scaled(q: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return q if scale is None else q * scale.to(q.dtype)


_Attend = Callable[[int, _Layer, torch.Tensor], torch.Tensor]


def _embedding(
    weight: torch.Tensor | BlockMatrix, kernels: ctypes.CDLL | None
) -> torch.Tensor | BlockEmbedding:
    if isinstance(weight, torch.Tensor):
        return weight
    assert kernels is not None
    return BlockEmbedding(weight, kernels)


def _layer_ops(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, kernels: ctypes.CDLL | None
) -> LayerOps:
    if kernels is not None and device.type == "cpu" and dtype == torch.bfloat16:
        return NativeOps(config.hidden_act, config.rms_norm_eps, kernels)
    return TorchOps(config.hidden_act, config.rms_norm_eps, dtype)


def _fuse(
    config: ModelConfig, layers: list[_Layer], kernels: ctypes.CDLL | None
) -> FusedLayers | None:
    """The layers fused into one call, or None if the kernels do not support the model."""
    if kernels is None or config.hidden_act != "silu" or config.rope.query_scaling_beta:
        return None
    fused = []
    for layer in layers:
        products = (layer.qkv, layer.o, layer.gate_up, layer.down)
        native = [product for product in products if isinstance(product, NativeLinear)]
        if len(native) < len(products):
            return None
        qkv, o, gate_up, down = native
        norms = (layer.input_norm, layer.post_norm, layer.qk_norm)
        fused.append(FusedLayer(qkv, o, gate_up, down, *norms))
    return FusedLayers(fused, config.sliding_windows, config.rms_norm_eps, kernels)


def _qk_norm(config: ModelConfig, layer: LayerWeights) -> torch.Tensor | None:
    """The norms of q and k as one weight, a row per head: [num_heads + num_kv_heads, head_dim]."""
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return torch.cat(
        (layer.q_norm.expand(config.num_heads, -1), layer.k_norm.expand(config.num_kv_heads, -1))
    )
