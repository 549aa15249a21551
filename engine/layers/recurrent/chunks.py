"""The tokens of one sequence in chunks, and how much a head's state decays within a chunk.

Within a chunk all tokens are computed at once, by matrix products; from chunk to chunk the state is
passed on. The module knows no recurrence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

CHUNK = 64


class Chunks:
    """N tokens in `number` chunks of `size` tokens, at most CHUNK; zeros fill the last one."""

    def __init__(self, num_tokens: int) -> None:
        self.size = min(CHUNK, num_tokens)
        self.number = -(-num_tokens // self.size)
        self._num_tokens = num_tokens

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Values of all tokens [N, num_heads, ...] as [num_heads, number, size, ...]."""
        missing = self.number * self.size - self._num_tokens
        x = pad(x.transpose(0, 1), (0, 0) * (x.dim() - 2) + (0, missing))
        return x.reshape(len(x), self.number, self.size, *x.shape[2:])

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """The values that `split` has split."""
        return x.flatten(1, 2)[:, : self._num_tokens].transpose(0, 1)


class Decays(NamedTuple):
    """Factors by which states decay in chunks of `size` tokens.

    - `to_token`: from a chunk's beginning to each token, [num_heads, number, size, 1].
    - `to_end`: from each token to the chunk's end, [num_heads, number, size, 1].
    - `between`: from one token (a column) to a later one (a row), [num_heads, number, size, size];
      0 for earlier ones.
    - `whole`: over the whole chunk, [num_heads, number, 1, 1].
    """

    to_token: torch.Tensor
    to_end: torch.Tensor
    between: torch.Tensor
    whole: torch.Tensor


def decays_of(g: torch.Tensor) -> Decays:
    """The decays of tokens whose own decays are exp(g), [num_heads, number, size]."""
    decay, size = g.cumsum(2), g.shape[2]
    above = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    between = (decay.unsqueeze(3) - decay.unsqueeze(2)).masked_fill(above, -torch.inf).exp()
    to_end = (decay[:, :, -1:] - decay).exp().unsqueeze(3)
    return Decays(decay.exp().unsqueeze(3), to_end, between, decay[:, :, -1].exp()[..., None, None])
