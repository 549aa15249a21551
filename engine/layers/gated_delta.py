"""A layer with a gated delta rule: a convolution over the last tokens, then linear attention whose
state is all that later tokens see (Qwen3-Next, Qwen3.5).

`engine.layers.convolved_states` has the states, and `engine.layers.delta_rule` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from engine.checkpoint.delta_config import DeltaConfig
from engine.checkpoint.layer_tensors import KindWeights, LayerTensor, Rows
from engine.checkpoint.model_config import ModelConfig
from engine.layers.attention_pass import AttentionPass
from engine.layers.convolved_states import ConvolvedStates
from engine.layers.delta_rule import DeltaInputs, chunked, one_each
from engine.layers.linear import LinearFactory, LinearLayer


class GatedDelta:
    """One layer's attention, from normed inputs to the sum with the residual. Tensors hold q, k
    and v of all heads one after the other, then the gates."""

    def __init__(self, config: ModelConfig, weights: KindWeights, make: LinearFactory) -> None:
        self._config = _delta(config)
        self._eps = config.rms_norm_eps
        matrices, vectors = weights.matrices, weights.vectors
        self._qkvz = make.linear(matrices.pop("qkvz"), None)
        self._ba = make.linear(matrices.pop("ba"), None)
        delta = self._config
        shape = (delta.num_value_heads, delta.key_dim, delta.value_dim)
        self._states = ConvolvedStates(vectors["conv"].t().contiguous(), shape)
        rates = vectors["rates"]  # [num_value_heads]
        self._rate = rates if delta.has_rates else -rates.exp()
        self._rate_bias = vectors["dt_bias"]
        self._norm = vectors["norm"]  # [value_dim]
        self._o = make.output_linear(matrices.pop("o"), None)

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        """See Kind."""
        heads = _delta(config).num_value_heads
        ba = [Rows(f"in_proj_{name}.weight", heads) for name in "ba"]
        return _tensors(config, _inputs_of_all(config), ba)

    @property
    def products(self) -> Sequence[LinearLayer]:
        """See AttentionLayer."""
        return self._qkvz, self._ba, self._o

    def attend(self, x: torch.Tensor, layer: int, batch: AttentionPass) -> torch.Tensor:
        """See AttentionLayer."""
        delta, states = self._config, batch.states(layer)
        mixed, z = self._split_inputs(self._qkvz(x))
        b, a = self._split_gates(self._ba(x))
        mixed = mixed.float()
        g = self._rate * softplus(a.float() + self._rate_bias)
        rule = _DeltaRule(delta, g, b.float().sigmoid())
        out = mixed.new_empty(len(x), delta.num_value_heads, delta.value_dim)
        self._states.run(mixed, states, rule, out)
        normed = out * torch.rsqrt(out.square().mean(2, keepdim=True) + self._eps) * self._norm
        return (normed * silu(z.float()).view_as(out)).flatten(1).to(x.dtype)

    def output(self, attended: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionLayer."""
        return self._o(attended, add=add)

    def _split_inputs(self, qkvz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k and v of all heads [N, conv_width], and the gates z [N, values_width]."""
        mixed, z = qkvz.split([self._config.conv_width, self._config.values_width], dim=1)
        return mixed, z

    def _split_gates(self, ba: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """b and a, [N, num_value_heads] each."""
        b, a = ba.chunk(2, dim=1)
        return b, a


@dataclass(frozen=True)
class _DeltaRule:
    """See Rule. The logarithms of the decays `g` and the strengths `beta` are those of a batch's
    tokens, [N, num_value_heads], fp32."""

    config: DeltaConfig
    g: torch.Tensor
    beta: torch.Tensor

    def consecutive(
        self, convolved: torch.Tensor, at: slice, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Rule."""
        return chunked(self._inputs(convolved, at), state)

    def one_each(
        self, convolved: torch.Tensor, at: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """See Rule."""
        return one_each(self._inputs(convolved, at), state)

    def _inputs(self, convolved: torch.Tensor, at: slice | torch.Tensor) -> DeltaInputs:
        delta = self.config
        widths = [delta.keys_width, delta.keys_width, delta.values_width]
        q, k, v = convolved.split(widths, dim=1)
        q, k = (each.unflatten(1, (-1, delta.key_dim)) for each in (q, k))
        if delta.keys_by_turns:
            repeats = delta.num_value_heads // delta.num_key_heads
            q, k = q.repeat(1, repeats, 1), k.repeat(1, repeats, 1)
        return DeltaInputs(q, k, v.unflatten(1, (-1, delta.value_dim)), self.g[at], self.beta[at])


class GatedDeltaGatesByHead(GatedDelta):
    """Tensors hold b and a of the first key head, then those of the second (Qwen3-Next in GGUF
    files)."""

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        """See Kind."""
        return _tensors(config, _inputs_of_all(config), _gates_by_head(config))

    def _split_gates(self, ba: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See GatedDelta."""
        b, a = ba.unflatten(1, (self._config.num_key_heads, 2, -1)).unbind(2)
        return b.flatten(1), a.flatten(1)


class GatedDeltaByHead(GatedDeltaGatesByHead):
    """So do those with q, k, v and z (Qwen3-Next, and its older GGUF files)."""

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        """See Kind."""
        delta = _delta(config)
        qkvz = [Rows("in_proj_qkvz.weight", delta.conv_width + delta.values_width)]
        return _tensors(config, qkvz, _gates_by_head(config))

    def _split_inputs(self, qkvz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See GatedDelta."""
        delta = self._config
        values = delta.num_value_heads // delta.num_key_heads * delta.value_dim
        widths = [delta.key_dim, delta.key_dim, values, values]
        by_head = qkvz.unflatten(1, (delta.num_key_heads, -1)).split(widths, dim=2)
        q, k, v, z = (each.flatten(1) for each in by_head)
        return torch.cat((q, k, v), dim=1), z


def _delta(config: ModelConfig) -> DeltaConfig:
    assert config.delta is not None
    return config.delta


def _inputs_of_all(config: ModelConfig) -> list[Rows]:
    delta = _delta(config)
    return [
        Rows("in_proj_qkv.weight", delta.conv_width),
        Rows("in_proj_z.weight", delta.values_width),
    ]


def _gates_by_head(config: ModelConfig) -> list[Rows]:
    return [Rows("in_proj_ba.weight", 2 * _delta(config).num_value_heads)]


def _tensors(config: ModelConfig, qkvz: list[Rows], ba: list[Rows]) -> list[LayerTensor]:
    delta, hidden = _delta(config), config.hidden_size
    heads = delta.num_value_heads
    conv = Rows("conv1d.weight", delta.conv_width, middle=(1,))
    return [
        LayerTensor("qkvz", qkvz, hidden),
        LayerTensor("ba", ba, hidden),
        LayerTensor("conv", [conv], delta.num_taps, is_wide=True),
        LayerTensor("rates", [Rows("rates" if delta.has_rates else "A_log", heads)], is_wide=True),
        LayerTensor("dt_bias", [Rows("dt_bias", heads)], is_wide=True),
        LayerTensor("norm", [Rows("norm.weight", delta.value_dim)], is_wide=True),
        LayerTensor("o", [Rows("out_proj.weight", hidden)], delta.values_width),
    ]
