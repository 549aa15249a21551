"""The state space of Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060), in fp32 by torch.

Each head keeps a state S, [head_dim, state_size]. A token with the input x, the step dt, the decay
exp(g) and the group's b and c changes it to `S' = exp(g) S + dt x b`, and its output is `S' c`.
`chunked` computes many tokens of one sequence by matrix products over chunks. `one_each` computes
one token of each of many sequences. The module knows no layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.layers.recurrent.chunks import Chunks, decays_of


class SpaceInputs(NamedTuple):
    """The inputs of N tokens: `x` [N, num_heads, head_dim], `b` and `c` [N, num_groups,
    state_size], the steps `dt` and the logarithms of the decays `g`, both [N, num_heads]; fp32."""

    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    dt: torch.Tensor
    g: torch.Tensor


def chunked(inputs: SpaceInputs, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of consecutive tokens, [N, num_heads, head_dim], and the state behind them,
    [num_heads, head_dim, state_size]. `state` is the state before them; None means an empty
    state."""
    stepped, b, c = _by_head(inputs)
    chunks = Chunks(len(stepped))
    stepped, b, c, g = (chunks.split(x) for x in (stepped, b, c, inputs.g))
    decays = decays_of(g)
    out = (c @ b.transpose(2, 3) * decays.between) @ stepped
    c = c * decays.to_token
    # the state that each chunk adds, at its end
    added = (stepped * decays.to_end).transpose(2, 3) @ b
    if state is None:
        state = torch.zeros_like(added[:, 0])
    for chunk in range(chunks.number):
        out[:, chunk] += c[:, chunk] @ state.transpose(1, 2)
        state = state * decays.whole[:, chunk] + added[:, chunk]
    return chunks.join(out), state


def one_each(inputs: SpaceInputs, state: torch.Tensor) -> torch.Tensor:
    """The outputs of one token of each of N sequences, [N, num_heads, head_dim]; their states
    `state`, [N, num_heads, head_dim, state_size], are changed in place."""
    stepped, b, c = _by_head(inputs)
    state *= inputs.g.exp()[..., None, None]
    state.addcmul_(stepped.unsqueeze(3), b.unsqueeze(2))
    return (state @ c.unsqueeze(3)).squeeze(3)


def _by_head(inputs: SpaceInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs times their steps, and b and c for each head."""
    repeats = inputs.x.shape[1] // inputs.b.shape[1]
    b, c = (each.repeat_interleave(repeats, 1) for each in (inputs.b, inputs.c))
    return inputs.x * inputs.dt.unsqueeze(2), b, c
