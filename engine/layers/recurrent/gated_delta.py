"""A layer with a gated delta rule: a convolution over the last tokens, then linear attention whose
state is all that later tokens see (Qwen3-Next, Qwen3.5).

`convolved_states` has the states, and `delta_rule` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from engine.checkpoint.delta_config import DeltaConfig
from engine.checkpoint.layer_tensors import KindWeights, LayerTensor, Rows, Split
from engine.checkpoint.model_config import ModelConfig
from engine.layers.attention_pass import AttentionPass
from engine.layers.linear import LinearFactory, LinearLayer
from engine.layers.recurrent.convolved_states import ConvolvedStates
from engine.layers.recurrent.delta_rule import DeltaInputs, chunked, one_each


class GatedDelta:
    """One layer's attention, from normed inputs to the sum with the residual. Tensors hold q, k
    and v of all heads one after the other, then the gates. Between the products, value heads are in
    the order of their key heads, whatever the order in the tensors."""

    def __init__(self, config: ModelConfig, weights: KindWeights, make: LinearFactory) -> None:
        self._config = _delta(config)
        self._eps = config.rms_norm_eps
        matrices, vectors = weights.matrices, weights.vectors
        self._qkvz = make.linear(matrices.pop("qkvz"), None)
        self._ba = make.linear(matrices.pop("ba"), None)
        delta = self._config
        shape = (delta.num_value_heads, delta.key_dim, delta.value_dim)
        taps = self._by_key_head(vectors["conv"].t(), delta.conv_sections)
        self._states = ConvolvedStates(
            delta.num_key_heads, delta.conv_sections, shape, taps.contiguous()
        )
        heads = (delta.num_value_heads,)
        rates = self._by_key_head(vectors["rates"].unsqueeze(0), heads)[0]
        self._rate = rates if delta.has_rates else -rates.exp()
        self._rate_bias = self._by_key_head(vectors["dt_bias"].unsqueeze(0), heads)[0]
        self._norm = vectors["norm"]  # [value_dim]
        self._o = make.output_linear(matrices.pop("o"), None)

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        """See Kind."""
        delta = _delta(config)
        heads = delta.num_value_heads
        turns = delta.in_turns(heads)
        ba = [Rows(f"in_proj_{name}.weight", heads, sections=turns) for name in "ba"]
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
        gated = normed * silu(z.float()).view_as(out)
        if delta.turns > 1:  # back to the order of the tensors
            gated = gated.unflatten(1, (-1, delta.turns)).transpose(1, 2)
        return gated.flatten(1).to(x.dtype)

    def output(self, attended: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionLayer."""
        return self._o(attended, add=add)

    def _split_inputs(self, qkvz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k and v of all heads [N, conv_width], and the gates z [N, values_width]."""
        delta = self._config
        mixed, z = qkvz.split([delta.conv_width, delta.values_width], dim=1)
        mixed = self._by_key_head(mixed, delta.conv_sections)
        return mixed, self._by_key_head(z, (delta.values_width,))

    def _split_gates(self, ba: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """b and a, [N, num_value_heads] each."""
        heads = (self._config.num_value_heads,)
        b, a = (self._by_key_head(each, heads) for each in ba.chunk(2, dim=1))
        return b, a

    def _by_key_head(self, x: torch.Tensor, sections: Sequence[int]) -> torch.Tensor:
        """`x` [N, width], whose last section are numbers of value heads in the order of the
        tensors, with these in the order of their key heads."""
        delta = self._config
        if delta.turns == 1:
            return x
        *others, values = x.split(list(sections), dim=1)
        by_turn = values.unflatten(1, (delta.turns, delta.num_key_heads, -1))
        return torch.cat((*others, by_turn.transpose(1, 2).flatten(1)), dim=1)


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
        q, k, v = convolved.split(delta.conv_sections, dim=1)
        q, k = (each.unflatten(1, (-1, delta.key_dim)) for each in (q, k))
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
    of_values = delta.in_turns(delta.values_width)
    sections = (delta.keys_width, delta.keys_width, *of_values)
    return [
        Rows("in_proj_qkv.weight", delta.conv_width, sections=sections),
        Rows("in_proj_z.weight", delta.values_width, sections=of_values),
    ]


def _gates_by_head(config: ModelConfig) -> list[Rows]:
    return [Rows("in_proj_ba.weight", 2 * _delta(config).num_value_heads)]


def _tensors(config: ModelConfig, qkvz: list[Rows], ba: list[Rows]) -> list[LayerTensor]:
    delta, hidden = _delta(config), config.hidden_size
    of_heads, of_values = (
        delta.in_turns(count) for count in (delta.num_value_heads, delta.values_width)
    )
    sections = (delta.keys_width, delta.keys_width, *of_values)
    conv = Rows("conv1d.weight", delta.conv_width, middle=(1,), sections=sections)

    def by_head(name: str, stored_name: str) -> LayerTensor:
        rows = Rows(stored_name, delta.num_value_heads, sections=of_heads)
        return LayerTensor(name, [rows], split=Split.OUTPUTS, is_wide=True)

    return [
        LayerTensor("qkvz", qkvz, hidden, Split.OUTPUTS),
        LayerTensor("ba", ba, hidden, Split.OUTPUTS),
        LayerTensor("conv", [conv], delta.num_taps, Split.OUTPUTS, is_wide=True),
        by_head("rates", "rates" if delta.has_rates else "A_log"),
        by_head("dt_bias", "dt_bias"),
        LayerTensor("norm", [Rows("norm.weight", delta.value_dim)], is_wide=True),
        LayerTensor(
            "o",
            [Rows("out_proj.weight", hidden)],
            delta.values_width,
            Split.INPUTS,
            input_sections=of_values,
        ),
    ]
