"""The fused form of a bf16 model on a CPU: all layers in one call, or a whole step in one."""

from __future__ import annotations

import ctypes

import torch

from engine.attention.base import AttentionBackend
from engine.attention.groups import FusedAttention
from engine.cpu.block_panels import BlockEmbedding
from engine.cpu.fused_layers import FusedLayer, FusedLayers
from engine.cpu.fused_step import Ends, FusedStep
from engine.cpu.native_experts import NativeExperts
from engine.cpu.native_linear import NativeLinear
from engine.cpu.native_ops import GATES
from engine.layers.embedding import ScaledEmbedding, TorchEmbedding
from engine.layers.experts_feed_forward import ExpertsFeedForward
from engine.layers.gated_feed_forward import GatedFeedForward
from engine.layers.grouped_attention import GroupedAttention
from engine.layers.kinds import FeedForwardLayer
from engine.layers.summed import part_of
from engine.models.parts import Layer, ModelParts


class KernelPass:
    """A `FusedPass` by the kernels; see `fused`."""

    def __init__(
        self, parts: ModelParts, ends: Ends | None, layers: FusedLayers, kernels: ctypes.CDLL
    ) -> None:
        local = parts.local_rope
        self._ropes = [parts.rope] if local is None else [parts.rope, local]
        self._vocab_size = parts.config.vocab_size
        self._ends = ends
        self._layers = layers
        self._kernels = kernels

    def supports(self, attention: AttentionBackend) -> bool:
        """See FusedPass."""
        return isinstance(attention, FusedAttention)

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See FusedPass."""
        assert isinstance(attention, FusedAttention)
        tables = [rope.tables(attention.longest) for rope in self._ropes]
        return self._layers(x, positions, tables, attention, rows)

    def whole_step(self, attention: AttentionBackend) -> FusedStep | None:
        """See FusedPass."""
        assert isinstance(attention, FusedAttention)
        if self._ends is None:
            return None
        return FusedStep(
            self._ends, self._layers, self._ropes, attention, self._kernels, self._vocab_size
        )


def fused(parts: ModelParts, kernels: ctypes.CDLL) -> KernelPass | None:
    """The fused form of a model, or None if the kernels do not support it."""
    config = parts.config
    gate = GATES.get(config.hidden_act)
    if gate is None or config.rope.query_scaling_beta:
        return None
    layers = []
    for layer, window in zip(parts.layers, config.sliding_windows, strict=True):
        has_local_rope = window is not None and parts.local_rope is not None
        fused_layer = _fused_layer(layer, int(has_local_rope))
        if fused_layer is None:
            return None
        layers.append(fused_layer)
    in_one_call = FusedLayers(layers, config.rms_norm_eps, kernels, gate, parts.sums)
    return KernelPass(parts, _ends(parts), in_one_call, kernels)


def _ends(parts: ModelParts) -> Ends | None:
    """What comes before and after the layers; None for a stage, which lacks one of them."""
    if not (parts.config.embeds and parts.config.gives_logits):
        return None
    assert isinstance(parts.lm_head, NativeLinear)
    scaled = parts.embed if isinstance(parts.embed, ScaledEmbedding) else None
    look_up = part_of(parts.embed if scaled is None else scaled.plain)
    assert isinstance(look_up, TorchEmbedding | BlockEmbedding)
    embed = look_up.weight if isinstance(look_up, TorchEmbedding) else look_up
    scale = 1.0 if scaled is None else scaled.scale
    return Ends(embed, parts.final_norm, parts.lm_head, parts.config.own_tokens.start, scale)


def _fused_layer(layer: Layer, rope: int) -> FusedLayer | None:
    """The fused form of a layer; None if the kernels do not compute all of its parts."""
    attention = layer.attention
    if not isinstance(attention, GroupedAttention) or layer.post_norm is None:
        return None
    if attention.kv_scales is not None:
        return None
    feed_forward = _fused_feed_forward(layer.feed_forward)
    qkv, o = attention.qkv, part_of(attention.o)
    if feed_forward is None or not isinstance(qkv, NativeLinear):
        return None
    if not isinstance(o, NativeLinear):
        return None
    if isinstance(feed_forward, NativeExperts) and layer.feed_forward_out_norm is not None:
        return None
    norms = (layer.input_norm, layer.post_norm, attention.qk_norm)
    out_norms = (layer.attention_out_norm, layer.feed_forward_out_norm)
    return FusedLayer(qkv, o, feed_forward, *norms, *out_norms, rope, attention.sinks)


def _fused_feed_forward(
    half: FeedForwardLayer,
) -> tuple[NativeLinear, NativeLinear] | NativeExperts | None:
    if isinstance(half, ExpertsFeedForward):
        experts = part_of(half.experts)
        return experts if isinstance(experts, NativeExperts) else None
    if not isinstance(half, GatedFeedForward):
        return None
    gate_up, down = half.gate_up, part_of(half.down)
    if isinstance(gate_up, NativeLinear) and isinstance(down, NativeLinear):
        return gate_up, down
    return None
