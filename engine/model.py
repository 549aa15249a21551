"""One decoder for every supported architecture: Llama, Mistral, Qwen2, Qwen3.

They share the shape `x += attention(norm(x)); x += mlp(norm(x))`; where they differ (biases,
norms on q and k, tied embeddings, rotary kind) `ModelConfig` and the weights say so. Owns the
arithmetic of a forward pass; knows nothing of sequences or blocks, which the attention backend
has planned before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import embedding, gelu, linear, silu

from engine.attention.base import AttentionBackend
from engine.checkpoint import LayerWeights, Weights
from engine.config import ModelConfig
from engine.rope import Rope, rotate

_tanh_gelu = partial(gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
}


class DecoderModel:
    """A model ready to run, on the device and in the dtype of its weights."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.device = weights.embed.device
        self.dtype = weights.embed.dtype
        self._weights = weights
        self._rope = Rope(config.rope, config.head_dim, self.device)
        self._activation = _ACTIVATIONS[config.hidden_act]
        self._qk_norms = [_qk_norm(config, layer) for layer in weights.layers]

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        logits_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [R, vocab], fp32, of the tokens at `logits_rows` [R] (None: of all).

        `token_ids` and `positions` are [N], in the order of the segments that `attention` was
        planned with. R may be 0: then the pass only fills the KV pool.
        """
        rotation = self._rope.cos_sin(positions, self.dtype)
        x = embedding(token_ids, self._weights.embed)  # [N, hidden]
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attend(index, layer, self._norm(x, layer.input_norm), rotation, attention)
            x = x + self._mlp(layer, self._norm(x, layer.post_norm))
        if logits_rows is not None:
            x = x.index_select(0, logits_rows)
        x = self._norm(x, self._weights.final_norm)
        return linear(x, self._weights.lm_head).to(torch.float32)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionBackend,
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = linear(x, layer.qkv, layer.qkv_bias)
        heads = qkv.view(len(x), num_heads + 2 * num_kv_heads, self.config.head_dim)
        qk, v = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
        qk_norm = self._qk_norms[index]
        if qk_norm is not None:
            qk = self._norm(qk, qk_norm)
        q, k = torch.split(rotate(qk, *rotation), [num_heads, num_kv_heads], dim=1)
        out = attention.run(index, q, k, v)  # [N, num_heads, head_dim]
        return linear(out.flatten(1), layer.o, layer.o_bias)

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return linear(self._activation(gate) * up, layer.down, layer.down_bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension: normalised in fp32, scaled in the model's dtype."""
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (wide * scale).to(x.dtype) * weight


def _qk_norm(config: ModelConfig, layer: LayerWeights) -> torch.Tensor | None:
    """The norms of q and k as one weight, a row per head: [num_heads + num_kv_heads, head_dim]."""
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return torch.cat(
        (layer.q_norm.expand(config.num_heads, -1), layer.k_norm.expand(config.num_kv_heads, -1))
    )
