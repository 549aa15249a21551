"""Linear layers by oneDNN and torch against plain products in float64."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.layers import linear
from engine.layers.linear import TorchLinear, WidenedLinear
from tests.forked import fork_context
from tests.unit.engine.layers.older_cpu import check_layers

ROWS = [0, 1, 3, 8, 32, 100]


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


needs_bf16_products = pytest.mark.skipif(
    not linear.has_bf16_products(), reason="this CPU has no bf16 products"
)


@needs_bf16_products
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (33, 7), (200, 1)])
def test_bf16_is_rounded_once(rows, biased, inputs, outputs):
    weight = tensor(0, outputs, inputs)
    bias = tensor(1, outputs) if biased else None
    x, residual = tensor(2, rows, inputs), tensor(3, rows, outputs)
    layer = TorchLinear(weight, bias)
    assert layer.is_packed
    for add in (None, residual):
        y = layer(x, add=add)
        assert y.dtype == torch.bfloat16
        expected = exact(x, weight, bias) + (0 if add is None else add.double())
        torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=2**-10)


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


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 32, 100])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (33, 7), (200, 1), (600, 3)])
def test_widened_pieces_are_rounded_once(monkeypatch, rows, biased, inputs, outputs):
    """Pieces of 1, 2, 7 and 64 outputs; fewer inputs than a piece has numbers, and more."""
    monkeypatch.setattr(linear, "_NUMBERS_PER_PIECE", 500)
    monkeypatch.setattr(linear, "_scratch", threading.local())
    weight = tensor(0, outputs, inputs)
    bias = tensor(1, outputs) if biased else None
    x, residual = tensor(2, rows, inputs), tensor(3, rows, outputs)
    layer = WidenedLinear(weight, bias)
    product = exact(x, weight, bias)
    # few rows are torch's own bf16, rounded before the residual is added
    most = 1e-5 if rows > 4 or not rows else 2**-8 * product.abs().max().item()
    with torch.inference_mode():
        assert torch.equal(layer(x), layer(x.clone()))
    for add in (None, residual):
        y = layer(x, add=add)
        assert y.dtype == torch.bfloat16
        expected = product + (0 if add is None else add.double())
        torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=most)
    with torch.inference_mode():
        wide = layer.in_float32(x)
    out = torch.full((rows, outputs), 7.0)
    assert layer.in_float32(x, out) is out
    assert torch.equal(wide, out)
    assert wide.dtype == torch.float32
    rounding = 1e-5 if rows > 4 else 2**-8
    torch.testing.assert_close(wide.double(), product, rtol=rounding, atol=1e-4)
    assert torch.equal(weight, tensor(0, outputs, inputs))
    assert torch.equal(residual, tensor(3, rows, outputs))


@needs_bf16_products
def test_a_cpu_without_bf16_products_widens():
    process = fork_context().Process(target=check_layers)
    process.start()
    process.join(60)
    assert process.exitcode == 0
