"""One decoder for every supported architecture: Llama, Mistral, Qwen and their kin.

They share the structure `x += attention(norm(x)); x += feed_forward(norm(x))`; `ModelConfig`, the
weights and the kinds of layers define the differences. Owns the order of a forward pass; knows
nothing of sequences or blocks, which the attention backend plans before the pass, nor of the
machine, which `engine.backend` stands for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.attention.base import AttentionBackend
from engine.backend import Backend, WholeStep
from engine.checkpoint.config import ModelConfig
from engine.checkpoint.weights import LayerWeights, Weights
from engine.expert_loads import ExpertLoads
from engine.layers.attention_pass import AttentionPass
from engine.layers.experts_feed_forward import ExpertsFeedForward
from engine.layers.kinds import ATTENTION, FEED_FORWARD
from engine.layers.linear import LinearLayer
from engine.layers.rope import Rope, query_scale
from engine.models.architectures import LayerKinds
from engine.models.parts import Layer, ModelParts


class DecoderModel:
    """A model ready to run, on the device and in the dtype of its weights.

    `backend` makes its layers. Consumes `weights` while packing them, so that no layer is in memory
    twice: `weights.layers` is empty afterwards.
    """

    def __init__(self, config: ModelConfig, weights: Weights, backend: Backend) -> None:
        self.config = config
        self.device = weights.final_norm.device
        self.dtype = weights.final_norm.dtype
        weights.layers.reverse()
        layers: list[Layer] = []
        while weights.layers:
            kinds = config.layer_kinds[len(layers)]
            layers.append(_layer(config, kinds, weights.layers.pop(), backend))
        self._parts = ModelParts(
            config,
            backend.embedding(weights.embed),
            Rope(config.rope, config.rope_dim, self.device),
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
        rotation = self._parts.rope.cos_sin(positions, self._ops.rotation_dtype)
        scale = query_scale(self.config.rope, positions)
        return self._run_layers(x, AttentionPass(attention, self._ops, rotation, scale), rows)

    @torch.inference_mode()
    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, vocab], fp32, of hidden states [R, hidden]; written to `out` where given."""
        return self._parts.lm_head.in_float32(self._ops.norm(x, self._parts.final_norm), out)

    def whole_step(self, attention: AttentionBackend) -> WholeStep | None:
        """The whole step as one call, over this backend's pool; None if the machine has none for
        this model."""
        if self._fused is None or not self._fused.supports(attention):
            return None
        return self._fused.whole_step(attention)

    def _run_layers(
        self, x: torch.Tensor, batch: AttentionPass, rows: torch.Tensor | None
    ) -> torch.Tensor:
        layers, norm = self._parts.layers, self._ops.norm
        for index, layer in enumerate(layers):
            attended = layer.attention.attend(norm(x, layer.input_norm), index, batch)
            if rows is not None and layer is layers[-1]:
                attended, x = attended.index_select(0, rows), x.index_select(0, rows)
                if not len(rows):
                    break
            x = layer.attention.output(attended, add=x)
            x = layer.feed_forward(norm(x, layer.post_norm), self._ops, add=x)
        return x


def _layer(
    config: ModelConfig, kinds: LayerKinds, weights: LayerWeights, backend: Backend
) -> Layer:
    return Layer(
        weights.input_norm,
        ATTENTION[kinds.attention].make(config, weights.attention, backend),
        weights.post_norm,
        FEED_FORWARD[kinds.feed_forward].make(config, weights.feed_forward, backend),
    )
