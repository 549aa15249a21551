"""Packed linear layers against plain products in float64."""

from __future__ import annotations

import pytest
import torch

from engine.linear import TorchLinear

ROWS = [0, 1, 3, 8, 32, 100]


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (33, 7), (200, 1)])
def test_bf16_is_rounded_once(rows, biased, inputs, outputs):
    weight = tensor(0, outputs, inputs)
    bias = tensor(1, outputs) if biased else None
    x, residual = tensor(2, rows, inputs), tensor(3, rows, outputs)
    layer = TorchLinear(weight, bias)
    for add in (None, residual):
        y = layer(x, add=add)
        assert y.dtype == torch.bfloat16
        expected = exact(x, weight, bias) + (0 if add is None else add.double())
        tolerance = 2**-8 if layer.is_packed else 2**-6  # a plain sum is rounded once more
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
def test_other_dtypes_are_torchs_own_product(dtype, rows):
    weight, bias = tensor(0, 24, 40, dtype=dtype), tensor(1, 24, dtype=dtype)
    x, add = tensor(2, rows, 40, dtype=dtype), tensor(3, rows, 24, dtype=dtype)
    layer = TorchLinear(weight, bias)
    assert not layer.is_packed
    product = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(layer(x), product)
    assert torch.equal(layer(x, add=add), add + product)


def test_inputs_stay_as_they_are():
    weight, x, add = tensor(0, 16, 32), tensor(1, 4, 32), tensor(2, 4, 16)
    copies = [t.clone() for t in (weight, x, add)]
    TorchLinear(weight)(x, add=add)
    assert all(torch.equal(a, b) for a, b in zip((weight, x, add), copies, strict=True))
