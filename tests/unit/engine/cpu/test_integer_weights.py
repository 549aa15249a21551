"""Weights as integers of 8 bits: how far they are off, and that the kernel agrees."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cpu.integer_weights import GROUP_INPUTS, quantize
from engine.cpu.native_linear import NativeLinear
from tests.effort import times


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_no_weight_is_off_by_more_than_half_a_step():
    weight = normal(0, 30, 4 * GROUP_INPUTS)
    quantized = quantize(weight)
    assert quantized.values.dtype == torch.int8
    error = (quantized.dequantized() - weight.float()).abs().unflatten(1, (-1, GROUP_INPUTS))
    largest = weight.float().abs().unflatten(1, (-1, GROUP_INPUTS)).amax(-1)
    assert bool((error.amax(-1) <= 0.501 * largest / 127).all())


def test_zeros_stay_zero():
    quantized = quantize(torch.zeros(4, GROUP_INPUTS).bfloat16())
    assert bool((quantized.dequantized() == 0).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_spoils_its_group_alone(bad):
    weight = normal(0, 3, 2 * GROUP_INPUTS)
    weight[1, 5] = bad
    expected = torch.zeros(3, 2 * GROUP_INPUTS, dtype=torch.bool)
    expected[1, :GROUP_INPUTS] = True
    assert torch.equal(quantize(weight).dequantized().isnan(), expected)


def test_weights_of_several_slices_are_those_of_one(product_kernels):
    weight, x = normal(0, 4700, GROUP_INPUTS), normal(1, 5, GROUP_INPUTS)
    exact = x.double() @ quantize(weight).dequantized().double().T
    wide = NativeLinear(weight, None, product_kernels, 8).in_float32(x)
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-3)


@settings(max_examples=times(25, 60), deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 110),
    groups=st.integers(1, 5),
    outputs=st.integers(1, 140),
    data=st.data(),
)
def test_the_kernel_multiplies_what_the_integers_stand_for(
    product_kernels, rows, groups, outputs, data
):
    inputs = groups * GROUP_INPUTS
    weight, bias, x = normal(0, outputs, inputs), normal(1, outputs), normal(2, rows, inputs)
    layer = NativeLinear(weight, bias, product_kernels, 8)
    exact = x.double() @ quantize(weight).dequantized().double().T + bias.double()
    wide = layer.in_float32(x)
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-4 * inputs**0.5)
    begin = data.draw(st.integers(0, rows - 1))
    assert torch.equal(layer.in_float32(x[begin:]), wide[begin:])


def test_inputs_that_are_no_whole_groups_keep_their_weights(product_kernels):
    weight, x = normal(0, 20, 48), normal(1, 3, 48)
    eight, sixteen = (NativeLinear(weight, None, product_kernels, bits) for bits in (8, 16))
    assert eight.weight.bits == 16
    assert torch.equal(eight(x), sixteen(x))


def test_memory_is_what_the_bits_say(product_kernels):
    weight = normal(0, 256, 512)
    assert NativeLinear(weight, None, product_kernels, 8).num_bytes <= 0.54 * weight.nbytes
