"""Finds the top-p cut on a card, without sorting the vocabulary or waiting for the card.

Top-p keeps a row's most likely tokens that together hold the requested share of its weight; the cut
is the lowest of their values. Weights are integers, so sums are exact in any order, and the cut is
the value that sorting would find. This is a radix search: each value's bits, mapped to ascending
order, are its key. Weights are summed per upper half of the keys; then, within the upper half where
the share is reached, per lower half.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

FindCut = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function like `lowest_kept`."""

_HALF = 16
_NUM_BINS = 1 << _HALF
_SIGN = -(1 << 31)


def lowest_kept(scaled: torch.Tensor, weights: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """The lowest value [R, 1] to keep in each row of `scaled` [R, V], fp32.

    Keeps the largest values, until their `weights` [R, V], int64, sum to at least `needed` [R, 1],
    float64, or all are kept. Equal values are kept together.
    """
    needed = needed.clamp(min=1.0)  # always keeps the most likely token
    keys = _ascending(scaled)  # [R, V] int64, 0 to 2^32 - 1
    upper = _first_bin(keys >> _HALF, weights, needed)
    is_above = keys >> _HALF > upper
    needed = needed - weights.masked_fill(~is_above, 0).sum(dim=-1, keepdim=True)
    inside = weights.masked_fill(keys >> _HALF != upper, 0)
    lower = _first_bin(keys & (_NUM_BINS - 1), inside, needed)
    return _values(upper << _HALF | lower)


def _first_bin(bins: torch.Tensor, weights: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """The highest bin [R, 1] at which the weights, summed from above, reach `needed`; else 0."""
    rows = len(bins)
    sums = torch.zeros((rows, _NUM_BINS), dtype=torch.int64, device=bins.device)
    sums.scatter_add_(1, bins, weights)
    from_above = sums.flip(-1).cumsum(dim=-1)
    rank = (from_above < needed).sum(dim=-1, keepdim=True)
    return (_NUM_BINS - 1 - rank).clamp_(min=0)


def _ascending(values: torch.Tensor) -> torch.Tensor:
    """Integer keys in the order of the fp32 values: inverts all bits of negative values, and the
    sign bit of others."""
    bits = values.view(torch.int32)
    ordered = torch.where(bits < 0, ~bits, bits | _SIGN)
    return ordered.to(torch.int64) & 0xFFFFFFFF


def _values(keys: torch.Tensor) -> torch.Tensor:
    """The fp32 values of the keys."""
    bits = torch.where(keys >> 31 == 1, keys & 0x7FFFFFFF, ~keys & 0xFFFFFFFF)
    signed = torch.where(bits >> 31 == 1, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)
