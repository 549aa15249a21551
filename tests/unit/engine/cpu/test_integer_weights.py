"""Weights as integers: how far they are from what they stand for, and that the kernel agrees."""

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


@pytest.mark.parametrize("bits", [8, 4])
def test_no_weight_is_off_by_more_than_its_group_allows(bits):
    weight = normal(0, 30, 4 * GROUP_INPUTS)
    quantized = quantize(weight, bits)
    assert quantized.values.dtype == torch.int8
    assert int(quantized.values.max()) < 2 ** (bits - 1)
    assert int(quantized.values.min()) >= -(2 ** (bits - 1))
    error = (quantized.dequantized() - weight.float()).abs().unflatten(1, (-1, GROUP_INPUTS))
    largest = weight.float().abs().unflatten(1, (-1, GROUP_INPUTS)).amax(-1)
    step = largest / (2 ** (bits - 1) - 1)
    allowed = 0.501 * step if bits == 8 else 0.201 * largest  # a fifth may be clipped
    assert bool((error.amax(-1) <= allowed).all())


def test_clipping_never_adds_to_a_groups_error():
    weight = normal(1, 50, 2 * GROUP_INPUTS)
    weight[:, 3] *= 6  # outliers
    groups = weight.float().unflatten(1, (-1, GROUP_INPUTS))
    step = groups.abs().amax(-1, keepdim=True) / 7
    plain = ((groups / step).round() * step - groups).square().sum(-1)
    chosen = (quantize(weight, 4).dequantized() - weight.float()).unflatten(1, (-1, GROUP_INPUTS))
    assert bool((chosen.square().sum(-1) <= plain * 1.0001).all())
    assert bool((chosen.square().sum(-1) < plain * 0.999).any())


def test_zeros_stay_zero():
    quantized = quantize(torch.zeros(4, GROUP_INPUTS).bfloat16(), 4)
    assert bool((quantized.dequantized() == 0).all())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_spoils_its_group_alone(bits, bad):
    weight = normal(0, 3, 2 * GROUP_INPUTS)
    weight[1, 5] = bad
    expected = torch.zeros(3, 2 * GROUP_INPUTS, dtype=torch.bool)
    expected[1, :GROUP_INPUTS] = True
    assert torch.equal(quantize(weight, bits).dequantized().isnan(), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_several_slices_are_those_of_one(product_kernels, bits):
    weight, x = normal(0, 4700, GROUP_INPUTS), normal(1, 5, GROUP_INPUTS)
    exact = x.double() @ quantize(weight, bits).dequantized().double().T
    wide = NativeLinear(weight, None, product_kernels, bits).in_float32(x)
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-3)


@settings(max_examples=times(25, 60), deadline=None, derandomize=True)
@given(
    bits=st.sampled_from([8, 4]),
    rows=st.integers(1, 110),
    groups=st.integers(1, 5),
    outputs=st.integers(1, 140),
    data=st.data(),
)
def test_the_kernel_multiplies_what_the_integers_stand_for(
    product_kernels, bits, rows, groups, outputs, data
):
    inputs = groups * GROUP_INPUTS
    weight, bias, x = normal(0, outputs, inputs), normal(1, outputs), normal(2, rows, inputs)
    layer = NativeLinear(weight, bias, product_kernels, bits)
    exact = x.double() @ quantize(weight, bits).dequantized().double().T + bias.double()
    wide = layer.in_float32(x)
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-4 * inputs**0.5)
    begin = data.draw(st.integers(0, rows - 1))
    assert torch.equal(layer.in_float32(x[begin:]), wide[begin:])


def test_inputs_that_are_no_whole_groups_keep_their_weights(product_kernels):
    weight, x = normal(0, 20, 48), normal(1, 3, 48)
    four, sixteen = (NativeLinear(weight, None, product_kernels, bits) for bits in (4, 16))
    assert four.weight.bits == 16
    assert torch.equal(four(x), sixteen(x))


@pytest.mark.parametrize(("bits", "share"), [(8, 0.54), (4, 0.29)])
def test_memory_is_what_the_bits_say(product_kernels, bits, share):
    weight = normal(0, 256, 512)
    layer = NativeLinear(weight, None, product_kernels, bits)
    assert layer.num_bytes <= share * weight.nbytes
