"""The gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464), in fp32 by torch.

Each head keeps a state S, [key_dim, value_dim]. A token with the key k, the value v, the decay
exp(g) and the strength b changes it to `S' = exp(g) S + k (b (v - k exp(g) S))`, and its output is
`q S'`. `chunked` computes many tokens of one sequence by matrix products over chunks. `one_each`
computes one token of each of many sequences. Both norm the queries and keys. The module knows no
layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.layers.recurrent.chunks import Chunks, decays_of

_NORM_EPS = 1e-6


class DeltaInputs(NamedTuple):
    """The inputs of N tokens: `q` and `k` [N, num_key_heads, key_dim], `v` [N, num_value_heads,
    value_dim], the logarithms of the decays `g` and the strengths `beta`, both [N,
    num_value_heads]; fp32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


def chunked(inputs: DeltaInputs, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of consecutive tokens, [N, num_value_heads, value_dim], and the state behind
    them, [num_value_heads, key_dim, value_dim]. `state` is the state before them; None means an
    empty state."""
    q, k = _normed(inputs)
    chunks = Chunks(len(q))
    q, k, v, g, beta = (chunks.split(x) for x in (q, k, *inputs[2:]))
    decays = decays_of(g)
    weighted = beta.unsqueeze(3)
    system = (k * weighted) @ k.transpose(2, 3) * decays.between
    right = torch.cat((v, k * decays.to_token), dim=3) * weighted
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, read = solved.split([v.shape[3], k.shape[3]], dim=3)
    within = (q @ k.transpose(2, 3)) * decays.between
    q = q * decays.to_token
    k = (k * decays.to_end).transpose(2, 3)
    if state is None:
        state = q.new_zeros(len(q), q.shape[3], v.shape[3])
    out = torch.empty_like(v)
    for chunk in range(chunks.number):
        fresh = values[:, chunk] - read[:, chunk] @ state
        out[:, chunk] = q[:, chunk] @ state + within[:, chunk] @ fresh
        state = state * decays.whole[:, chunk] + k[:, chunk] @ fresh
    return chunks.join(out), state


def one_each(inputs: DeltaInputs, state: torch.Tensor) -> torch.Tensor:
    """The outputs of one token of each of N sequences, [N, num_value_heads, value_dim]; their
    states `state`, [N, num_value_heads, key_dim, value_dim], are changed in place."""
    q, k = _normed(inputs)
    state *= inputs.g.exp()[..., None, None]
    fresh = (inputs.v - (k.unsqueeze(2) @ state).squeeze(2)) * inputs.beta.unsqueeze(2)
    state.addcmul_(k.unsqueeze(3), fresh.unsqueeze(2))
    return (q.unsqueeze(2) @ state).squeeze(2)


def _normed(inputs: DeltaInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of length 1, one for each value head. Queries are also divided by the root
    of their size."""
    repeats = inputs.v.shape[1] // inputs.k.shape[1]
    scale = inputs.q.shape[2] ** -0.5
    q, k = (
        x * torch.rsqrt(x.square().sum(2, keepdim=True) + _NORM_EPS) for x in (inputs.q, inputs.k)
    )
    return (q * scale).repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
