"""A layer of Mamba-2: a convolution over the last tokens, then a state space whose state is all
that later tokens see (Nemotron-H).

`convolved_states` has the states, and `state_space` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from engine.checkpoint.layer_tensors import KindWeights, LayerTensor, Rows, Split
from engine.checkpoint.mamba_config import MambaConfig
from engine.checkpoint.model_config import ModelConfig
from engine.layers.attention_pass import AttentionPass
from engine.layers.linear import LinearFactory, LinearLayer
from engine.layers.recurrent.convolved_states import ConvolvedStates
from engine.layers.recurrent.state_space import SpaceInputs, chunked, one_each


class Mamba2:
    """One layer, from normed inputs to the sum with the residual."""

    def __init__(self, config: ModelConfig, weights: KindWeights, make: LinearFactory) -> None:
        self._config = mamba = _mamba(config)
        self._eps = config.rms_norm_eps
        matrices, vectors = weights.matrices, weights.vectors
        self._in = make.linear(matrices.pop("in"), None)
        shape = (mamba.num_heads, mamba.head_dim, mamba.state_size)
        taps = vectors["conv"].t().contiguous()  # [num_taps, conv_width]
        self._states = ConvolvedStates(
            mamba.num_groups, mamba.conv_sections, shape, taps, vectors.get("conv_bias")
        )
        rates = vectors["rates"]
        self._rate = rates if mamba.is_gguf else -rates.exp()  # [num_heads]
        self._step_bias, self._skip = vectors["dt_bias"], vectors["skip"]  # [num_heads]
        self._norm = vectors["norm"]  # [inner]
        self._o = make.output_linear(matrices.pop("o"), None)

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        """See Kind. Rows of `in` are the gate's, the convolution's, and the steps'. In GGUF files
        this tensor has the name of Qwen3-Next's."""
        mamba, hidden = _mamba(config), config.hidden_size
        sections = (mamba.inner, *mamba.conv_sections, mamba.num_heads)
        in_name = "in_proj_qkvz.weight" if mamba.is_gguf else "in_proj.weight"
        inputs = Rows(in_name, sum(sections), sections=sections)
        of_conv = mamba.conv_sections
        conv = Rows("conv1d.weight", mamba.conv_width, middle=(1,), sections=of_conv)

        def vector(name: str, rows: Rows) -> LayerTensor:
            return LayerTensor(name, [rows], split=Split.OUTPUTS, is_wide=True)

        found = [
            LayerTensor("in", [inputs], hidden, Split.OUTPUTS),
            LayerTensor("conv", [conv], mamba.num_taps, Split.OUTPUTS, is_wide=True),
            vector("rates", Rows("rates" if mamba.is_gguf else "A_log", mamba.num_heads)),
            vector("dt_bias", Rows("dt_bias", mamba.num_heads)),
            vector("skip", Rows("D", mamba.num_heads)),
            vector("norm", Rows("norm.weight", mamba.inner)),
            LayerTensor("o", [Rows("out_proj.weight", hidden)], mamba.inner, Split.INPUTS),
        ]
        if mamba.has_conv_bias:
            bias = Rows("conv1d.bias", mamba.conv_width, sections=of_conv)
            found.append(vector("conv_bias", bias))
        return found

    @property
    def products(self) -> Sequence[LinearLayer]:
        """See AttentionLayer."""
        return self._in, self._o

    def attend(self, x: torch.Tensor, layer: int, batch: AttentionPass) -> torch.Tensor:
        """See AttentionLayer."""
        mamba = self._config
        widths = [mamba.inner, mamba.conv_width, mamba.num_heads]
        gate, mixed, steps = self._in(x).split(widths, dim=1)
        dt = softplus(steps.float() + self._step_bias).clamp(*mamba.step_limits)
        rule = _SpaceRule(mamba, dt, dt * self._rate, self._skip)
        out = torch.empty(len(x), mamba.num_heads, mamba.head_dim, device=x.device)
        self._states.run(mixed.float(), batch.states(layer), rule, out)
        gated = (out.flatten(1) * silu(gate.float())).unflatten(1, (mamba.num_groups, -1))
        normed = gated * torch.rsqrt(gated.square().mean(2, keepdim=True) + self._eps)
        return (normed.flatten(1) * self._norm).to(x.dtype)

    def output(self, attended: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionLayer."""
        return self._o(attended, add=add)


@dataclass(frozen=True)
class _SpaceRule:
    """See Rule. The steps `dt` and the logarithms of the decays `g` are those of a batch's tokens,
    [N, num_heads]; `skip` [num_heads] times a head's input is added to its output; fp32."""

    config: MambaConfig
    dt: torch.Tensor
    g: torch.Tensor
    skip: torch.Tensor

    def consecutive(
        self, convolved: torch.Tensor, at: slice, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Rule."""
        inputs = self._inputs(convolved, at)
        out, state = chunked(inputs, state)
        return out + self.skip.unsqueeze(1) * inputs.x, state

    def one_each(
        self, convolved: torch.Tensor, at: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """See Rule."""
        inputs = self._inputs(convolved, at)
        return one_each(inputs, state) + self.skip.unsqueeze(1) * inputs.x

    def _inputs(self, convolved: torch.Tensor, at: slice | torch.Tensor) -> SpaceInputs:
        mamba = self.config
        x, b, c = convolved.split(mamba.conv_sections, dim=1)
        b, c = (each.unflatten(1, (mamba.num_groups, -1)) for each in (b, c))
        x = x.unflatten(1, (mamba.num_heads, -1))
        return SpaceInputs(x, b, c, self.dt[at], self.g[at])


def _mamba(config: ModelConfig) -> MambaConfig:
    assert config.mamba is not None
    return config.mamba
