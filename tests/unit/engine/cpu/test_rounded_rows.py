"""Weights rounded to blocks of 4 and 5 bits: never worse than plain rounding, exact on a grid."""

from __future__ import annotations

import math

import gguf
import pytest
import torch
from gguf.quants import dequantize
from gguf.quants import quantize as plainly_rounded
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cpu.native_linear import NativeLinear
from engine.cpu.rounded_rows import KINDS, RoundedRows, can_round
from engine.native.library import load_library
from tests.effort import times

BLOCK = 32


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(weight: torch.Tensor, bits: int, kernels) -> torch.Tensor:
    return RoundedRows(weight, KINDS[bits], kernels).dequantized()


def plain(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """By the gguf package: the least and the largest weight of a block are levels."""
    kind = gguf.GGMLQuantizationType[KINDS[bits]]
    return torch.from_numpy(dequantize(plainly_rounded(weight.float().numpy(), kind), kind))


def errors(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (values - weight.float()).unflatten(1, (-1, BLOCK)).square().sum(2)


@pytest.mark.parametrize("bits", KINDS)
@settings(max_examples=times(15, 100), deadline=None, derandomize=True)
@given(
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 4),
    size=st.sampled_from([1e-3, 0.02, 1.0, 300.0]),
    middle=st.sampled_from([0.0, 0.5, -40.0]),
)
def test_no_block_is_worse_than_plainly_rounded(
    product_kernels, bits, outputs, blocks, size, middle
):
    weight = random(outputs, outputs, blocks * BLOCK)
    weight[: outputs // 2] = weight[: outputs // 2].pow(3)  # outliers
    weight = ((weight + middle) * size).bfloat16()
    ours = errors(rounded(weight, bits, product_kernels), weight)
    # fp32 and halves are rounded in another order there
    allowed = errors(plain(weight, bits), weight) * 1.01 + 1e-4 * size**2
    assert bool((ours <= allowed).all())


@pytest.mark.parametrize("bits", KINDS)
def test_all_instruction_sets_round_alike(product_kernels, bits):
    """Workers with different CPUs hold the same weights."""
    weight = random(0, 200, 16 * BLOCK).bfloat16()
    assert torch.equal(
        rounded(weight, bits, product_kernels), rounded(weight, bits, load_library())
    )


@pytest.mark.parametrize(("bits", "most"), [(4, 0.82), (5, 0.9)])
def test_the_search_gains(product_kernels, bits, most):
    weight = (random(0, 64, 8 * BLOCK) * 0.05).bfloat16()
    ours, theirs = rounded(weight, bits, product_kernels), plain(weight, bits)
    assert float(errors(ours, weight).sum()) < most * float(errors(theirs, weight).sum())


@pytest.mark.parametrize(("bits", "levels"), [(4, 16), (5, 32), (5, 16)])
def test_weights_on_a_grid_stay_exact(product_kernels, bits, levels):
    """Also those of 16 levels in blocks of 32 levels."""
    generator = torch.Generator().manual_seed(levels)
    codes = torch.randint(0, levels, (40, 3 * BLOCK), generator=generator)
    codes[:, ::BLOCK], codes[:, 1::BLOCK] = 0, levels - 1
    steps = 2.0 ** torch.randint(-9, 3, (40, 3), generator=generator).repeat_interleave(BLOCK, 1)
    weight = ((codes - 7) * steps).bfloat16()
    assert torch.equal(rounded(weight, bits, product_kernels), weight.float())


@pytest.mark.parametrize("bits", KINDS)
@pytest.mark.parametrize("value", [0.0, 0.75, -3.0, 1e-30])
def test_blocks_of_one_value_keep_it(product_kernels, bits, value):
    weight = torch.full((5, 2 * BLOCK), value).bfloat16()
    values = rounded(weight, bits, product_kernels)
    torch.testing.assert_close(values, weight.float(), rtol=2**-10, atol=2**-24)


@pytest.mark.parametrize("bits", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_spoils_its_block_alone(product_kernels, bits, bad):
    weight = random(0, 20, 3 * BLOCK).bfloat16()
    good = rounded(weight, bits, product_kernels)
    weight[17, BLOCK + 5] = bad
    spoiled = torch.zeros(20, 3 * BLOCK, dtype=torch.bool)
    spoiled[17, BLOCK : 2 * BLOCK] = True
    values = rounded(weight, bits, product_kernels)
    assert torch.equal(values.isnan(), spoiled)
    assert torch.equal(values[~spoiled], good[~spoiled])
    assert can_round(weight)


@pytest.mark.parametrize("bits", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_layers_multiply_the_rounded_values(product_kernels, bits, rows):
    """Of several pieces, the last of which is no whole panel."""
    weight, x = random(0, 2100, 3 * BLOCK).bfloat16(), random(1, rows, 3 * BLOCK).bfloat16()
    layer = NativeLinear(weight, None, product_kernels, bits)
    exact = x.double() @ rounded(weight, bits, product_kernels).double().T
    torch.testing.assert_close(layer.in_float32(x).double(), exact, rtol=1e-5, atol=1e-3)
    assert 8 * layer.num_bytes / layer.count <= (bits + 1) * 2112 / 2100


@pytest.mark.parametrize("weight", [torch.ones(9, 48), torch.full((9, 64), 7e4)])
def test_weights_that_blocks_cannot_hold_stay(product_kernels, weight):
    layer = NativeLinear(weight.bfloat16(), None, product_kernels, 4)
    assert layer.weight.bits == 16
    assert torch.equal(layer(torch.eye(weight.shape[1]).bfloat16()), weight.bfloat16().T)
