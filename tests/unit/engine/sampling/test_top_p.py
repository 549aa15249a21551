"""The cut that a radix search finds is the one that sorting finds, bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.top_p import _ascending, _values, lowest_kept
from tests.effort import times


def by_sorting(scaled: torch.Tensor, weights: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    order = scaled.argsort(dim=-1, descending=True)
    reached = weights.gather(-1, order).cumsum(dim=-1)
    rank = (reached < needed).sum(dim=-1, keepdim=True).clamp(max=scaled.shape[-1] - 1)
    return scaled.gather(-1, order).gather(-1, rank)


@settings(max_examples=times(50, 150), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([1, 7, 300, 5000]),
    share=st.sampled_from([0.0, 1e-9, 0.3, 0.9, 0.999999, 1.0]),
    decimals=st.sampled_from([0, 1, 7]),
    forbidden=st.integers(0, 3),
)
def test_it_is_the_lowest_of_the_most_likely_that_hold_the_share(
    seed: int, vocab: int, share: float, decimals: int, forbidden: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scaled = (torch.randn((4, vocab), generator=generator) * 4).round(decimals=decimals)
    scaled[:, 1 : 1 + forbidden] = -torch.inf
    scaled -= scaled.amax(dim=-1, keepdim=True)
    weights = (scaled.exp() * 2.0**39).to(torch.int64)
    needed = weights.sum(dim=-1, keepdim=True).double() * share
    expected = by_sorting(scaled, weights, needed)
    found = lowest_kept(scaled, weights, needed)
    if share < 1.0:
        assert torch.equal(found, expected)
    kept = weights.masked_fill(scaled < found, 0).sum(dim=-1, keepdim=True)
    assert bool((kept >= needed).all())


def test_keys_have_the_order_of_their_values() -> None:
    values = torch.tensor([-torch.inf, -3e38, -1.5, -1e-45, 0.0, 1e-45, 2.0, 3e38, torch.inf])
    keys = _ascending(values)
    assert keys.tolist() == sorted(set(keys.tolist()))
    assert torch.equal(_values(keys), values)


def test_a_row_that_is_not_finite_disturbs_no_other() -> None:
    scaled = torch.tensor([[torch.nan, 0.0, -1.0], [0.0, -1.0, -9.0]])
    weights = (scaled.nan_to_num().exp() * 2.0**39).to(torch.int64)
    needed = torch.tensor([[1.0], [2.0**39 + 5]], dtype=torch.float64)
    assert lowest_kept(scaled, weights, needed)[1].item() == -1.0
