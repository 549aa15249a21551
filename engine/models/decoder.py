"""One decoder for every supported architecture: Llama, Mistral, Qwen and their kin.

They share the structure `x += attention(norm(x)); x += feed_forward(norm(x))`, where the added
results may be normed, too; `ModelConfig`, the weights and the kinds of layers define the
differences. Owns the order of a forward pass; knows nothing of sequences or blocks, which the
attention backend plans before the pass, nor of the machine, which `engine.backend` stands for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.attention.base import AttentionBackend
from engine.backend import Backend
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_weights import LayerWeights, Weights
from engine.device import torch_dtype
from engine.expert_loads import ExpertLoads
from engine.layers.attention_pass import AttentionPass
from engine.layers.embedding import scaled
from engine.layers.experts_feed_forward import ExpertsFeedForward
from engine.layers.kinds import ATTENTION, FEED_FORWARD
from engine.layers.linear import LinearLayer
from engine.layers.rope import Rope, query_scale
from engine.models.architectures import LayerKinds
from engine.models.parts import Layer, ModelParts
from engine.models.runnable import WholeStep


class DecoderModel:
    """A model ready to run, on the device and in the dtype of its weights.

    `backend` makes its layers. Consumes `weights` while packing them, so that no layer is in memory
    twice: `weights.layers` is empty afterwards.
    """

    def __init__(self, config: ModelConfig, weights: Weights, backend: Backend) -> None:
        self.config = config
        self.device = weights.final_norm.device
        self.dtype = torch_dtype(backend.dtype)
        weights.layers.reverse()
        layers: list[Layer] = []
        while weights.layers:
            kinds = config.layer_kinds[len(layers)]
            layers.append(_layer(config, kinds, weights.layers.pop(), backend))
        scale = config.embedding_scale if config.embeds else 1.0  # later stages have hidden states
        self._parts = ModelParts(
            config,
            scaled(backend.embedding(weights.embed), scale, self.dtype),
            Rope(config.rope, config.rope_dim, self.device),
            None
            if config.local_rope is None
            else Rope(config.local_rope, config.rope_dim, self.device),
            layers,
            weights.final_norm,
            backend.logits_linear(weights.lm_head),
        )
        self._ops = backend.ops()
        self._fused = backend.fuse(self._parts)

    def linear_layers(self) -> Iterator[LinearLayer]:
        """Every layer that multiplies by weights."""
        yield self._parts.lm_head
        for layer in self._parts.layers:
            yield from (*layer.attention.products, *layer.feed_forward.products)

    def expert_loads(self) -> ExpertLoads | None:
        """How evenly mixtures have used their experts; None if there are none. Waits for a card."""
        tallies = {
            half.experts.tally.data_ptr(): half.experts.tally
            for half in (layer.feed_forward for layer in self._parts.layers)
            if isinstance(half, ExpertsFeedForward)
        }
        if not tallies:
            return None
        return ExpertLoads(*torch.stack(list(tallies.values())).sum(0).tolist())

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
        x = self._parts.embed(token_ids)  # [N, hidden]
        if self._fused is not None and self._fused.supports(attention):
            return self._fused(x, positions, attention, rows)
        return self._run_layers(x, self._passes(positions, attention), rows)

    @torch.inference_mode()
    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, vocab], fp32, of hidden states [R, hidden]; written to `out` where given."""
        normed = self._ops.norm(x, self._parts.final_norm)
        logits = self._parts.lm_head.in_float32(normed, out)
        cap = self.config.logits_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def whole_step(self, attention: AttentionBackend) -> WholeStep | None:
        """The whole step as one call, over this backend's pool; None if the machine has none for
        this model."""
        if self._fused is None or not self._fused.supports(attention):
            return None
        if self.config.logits_cap is not None:  # the kernels compare logits without it
            return None
        return self._fused.whole_step(attention)

    def _passes(
        self, positions: torch.Tensor, attention: AttentionBackend
    ) -> tuple[AttentionPass, AttentionPass]:
        """The data that layers without windows share in a pass, and the data that layers with
        windows share."""

        def of(rope: Rope) -> AttentionPass:
            rotation = rope.cos_sin(positions, self._ops.rotation_dtype)
            return AttentionPass(attention, self._ops, rotation, scale)

        scale = query_scale(self.config.rope, positions)
        whole, local = of(self._parts.rope), self._parts.local_rope
        return whole, whole if local is None else of(local)

    def _run_layers(
        self,
        x: torch.Tensor,
        passes: tuple[AttentionPass, AttentionPass],
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        layers, norm = self._parts.layers, self._ops.norm
        windows = self.config.sliding_windows
        for index, layer in enumerate(layers):
            batch = passes[windows[index] is not None]
            attended = layer.attention.attend(norm(x, layer.input_norm), index, batch)
            if rows is not None and layer is layers[-1]:
                attended, x = attended.index_select(0, rows), x.index_select(0, rows)
                if not len(rows):
                    break
            x = self._after_attention(layer, attended, x)
            x = self._after_feed_forward(layer, x)
        return x

    def _after_attention(
        self, layer: Layer, attended: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        if layer.attention_out_norm is None:
            return layer.attention.output(attended, add=x)
        return self._ops.norm(layer.attention.output(attended), layer.attention_out_norm, add=x)

    def _after_feed_forward(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        normed = x if layer.post_norm is None else self._ops.norm(x, layer.post_norm)
        if layer.feed_forward_out_norm is None:
            return layer.feed_forward(normed, self._ops, add=x)
        y = layer.feed_forward(normed, self._ops)
        return self._ops.norm(y, layer.feed_forward_out_norm, add=x)


def _layer(
    config: ModelConfig, kinds: LayerKinds, weights: LayerWeights, backend: Backend
) -> Layer:
    return Layer(
        weights.input_norm,
        ATTENTION[kinds.attention].make(config, weights.attention, backend),
        weights.post_norm,
        FEED_FORWARD[kinds.feed_forward].make(config, weights.feed_forward, backend),
        weights.attention_out_norm,
        weights.feed_forward_out_norm,
    )
