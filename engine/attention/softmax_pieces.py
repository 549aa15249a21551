"""Softmax over keys that come in pieces: the means of values of each piece, and their weighted sum.

A piece's means are weighted by the total of its exponentials, whose logarithm is kept with them, as
in Flash-Decoding. All shapes begin with A, one entry for each head or sequence.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


class PieceSums:
    """Means of values over keys that come in pieces, for queries [A, n]; `like` has their dtype."""

    def __init__(self, rows: int, num_queries: int, value_dim: int, like: torch.Tensor) -> None:
        self._dtype = like.dtype
        self._means = like.new_zeros((rows, num_queries, value_dim), dtype=torch.float32)
        self._totals = like.new_full((rows, num_queries), -torch.inf, dtype=torch.float32)

    def add(self, first: int, means: torch.Tensor, totals: torch.Tensor) -> None:
        """`means` [A, m, value_dim] of one piece, for the queries from `first` on, and the
        logarithms of their totals, [A, m]."""
        place = slice(first, first + means.shape[1])
        before = self._totals[:, place]
        together = torch.logaddexp(before, totals)
        self._means[:, place].mul_((before - together).exp_().unsqueeze(-1))
        self._means[:, place].addcmul_(means.float(), (totals - together).exp_().unsqueeze(-1))
        self._totals[:, place] = together

    def result(self) -> torch.Tensor:
        """The means over all keys, [A, n, value_dim]."""
        return self._means.to(self._dtype)


_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def flash(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of `values` [A or 1, keys, value_dim] for queries `q` [A, n, size], on a CPU, without
    scores in memory, and the logarithms of their totals, [A, n], fp32. `is_causal`: query i sees
    keys 0 to i."""
    value_dim, size = values.shape[2], max(q.shape[2], values.shape[2])
    # the kernel needs one size
    q, keys, values = (pad(each, (0, size - each.shape[2])) for each in (q, keys, values))
    shape = (len(q), -1, -1)
    means, totals = _flash_attention(
        q[None], keys.expand(shape)[None], values.expand(shape)[None], 0.0, is_causal, scale=scale
    )
    return means[0, :, :, :value_dim], totals[0]


def weighted(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of `values` [A or 1, keys, size] by the softmax of `scores` [A, n, keys], fp32, and the
    logarithms of its totals, [A, n]. Means are 0 for queries that see no key."""
    totals = scores.logsumexp(-1)
    weights = scores.sub_(totals.clamp(min=_LOWEST).unsqueeze(-1)).exp_()
    return product(weights, values), totals


_LOWEST = torch.finfo(torch.float32).min


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left` [A, n, size] times `right` [A or 1, size, m], in fp32; on a card rounded to the dtype
    of `right`. If `right` is shared by all, there is a single product."""
    right = right.float() if right.device.type == "cpu" else right
    left = left.to(right.dtype)
    if len(right) == len(left):
        return (left @ right).float()
    return (left.flatten(0, 1) @ right[0]).unflatten(0, left.shape[:2]).float()
