"""The largest of each row: the kernel, numpy and torch agree, on what is odd, too."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.row_argmax import largest
from tests.effort import times
from tests.unit.engine.native.instruction_sets import kernels_for, usable_instruction_sets

ODD = [math.inf, -math.inf, math.nan, 0.0, -0.0, 3.5, 3.5]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 255, 32_000])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_equals_torchs_max(kernels, rows, size):
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    values, places = largest(x, kernels)
    best = x.max(dim=-1)
    assert torch.equal(values, best.values)
    assert torch.equal(places, best.indices)
    assert places.dtype == torch.int64


@pytest.mark.parametrize("instruction_set", usable_instruction_sets())
@settings(max_examples=times(100, 300), deadline=None, derandomize=True)
@given(numbers=st.lists(st.sampled_from([*ODD, 1.0, -2.0]), min_size=1, max_size=70))
def test_the_first_of_equal_ones_and_nan_before_all(kernels, instruction_set, numbers):
    kernels = kernels_for(instruction_set)
    x = torch.tensor([numbers, numbers])
    by_numpy, by_kernel = largest(x), largest(x, kernels)
    assert by_kernel[1].tolist() == by_numpy[1].tolist()
    torch.testing.assert_close(by_kernel[0], by_numpy[0], equal_nan=True, rtol=0, atol=0)


def test_rows_that_are_not_in_one_piece(kernels):
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))[:, :33]
    assert torch.equal(largest(x, kernels)[1], x.argmax(dim=-1))
