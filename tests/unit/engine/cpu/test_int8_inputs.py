"""Products of integer weights and inputs rounded to 8 bits: integers are summed exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from engine.checkpoint.quantized_blocks import MXFP4, BlockMatrix
from engine.cpu.integer_weights import quantize
from engine.cpu.native_linear import NativeLinear
from tests.effort import pairwise
from tests.unit.engine.cpu import test_block_panels as blocks
from tests.unit.engine.cpu import test_scaled_panels as codes

OUTPUTS, INPUTS, BLOCK = 150, 192, 32
FLOATS = {MXFP4, "E2M1_16", "E2M1_32", "E4M3_64"}


def of_blocks(kind: str) -> tuple[BlockMatrix, int, torch.Tensor]:
    rows = blocks.random_rows(kind, OUTPUTS, blocks.INPUTS)
    return blocks.matrix_of(rows, kind), 16, blocks.expected(rows, kind)


def of_codes(kind: str) -> tuple[BlockMatrix, int, torch.Tensor]:
    matrix = codes.matrix_of(kind)
    return codes.blocks_of(matrix), 16, matrix.values()


def of_integers(bits: int) -> tuple[torch.Tensor, int, torch.Tensor]:
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(bits)).bfloat16()
    return weight, bits, quantize(weight).dequantized()


WEIGHTS: dict[str, Callable[[], tuple[torch.Tensor | BlockMatrix, int, torch.Tensor]]] = {
    **{kind: lambda kind=kind: of_blocks(kind) for kind in blocks.KINDS},
    **{kind: lambda kind=kind: of_codes(kind) for kind in codes.KINDS},
    "int8": lambda: of_integers(8),
}
INTEGERS = [kind for kind in WEIGHTS if kind not in FLOATS]


def layer_of(kind: str, kernels, bias: torch.Tensor | None = None) -> NativeLinear:
    weight, bits, _ = WEIGHTS[kind]()
    return NativeLinear(weight, bias, kernels, bits, int8_inputs=True)


def inputs_of(kind: str, rows: int) -> torch.Tensor:
    values = WEIGHTS[kind]()[2]
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, values.shape[1], generator=generator)
    return (x * torch.randn(rows, 1, generator=generator).exp()).bfloat16()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What the integers stand for: each 32 inputs have their largest at 127."""
    groups = x.float().unflatten(1, (-1, BLOCK))
    largest = groups.abs().amax(2, keepdim=True)
    most = torch.full_like(largest, 127)  # torch would multiply a number by the reciprocal
    integers = (groups * (most / largest)).round().nan_to_num()
    return (integers.double() * (largest / most).double()).flatten(1)


@pairwise("kind, rows, biased", INTEGERS, [0, 1, 2, 6, 7, 16, 33, 49, 97, 200], [False, True])
def test_products_are_those_of_the_integers(int8_kernels, kind, rows, biased):
    bias = torch.arange(OUTPUTS).bfloat16() if biased else None
    layer, values = layer_of(kind, int8_kernels, bias), WEIGHTS[kind]()[2].double()
    assert layer.weight.has_int8_inputs
    x = inputs_of(kind, rows)
    exact = rounded(x) @ values.T + (0 if bias is None else bias.double())
    largest = values.abs() + values.abs().amax(1, keepdim=True)  # minima are apart from codes
    scale = x.double().abs() @ largest.T + (0 if bias is None else bias.double()) + 1e-6
    assert torch.all((layer.in_float32(x) - exact).abs() < 1e-6 * scale)
    assert torch.all((layer(x) - exact).abs() < 2**-8 * exact.abs() + 1e-6 * scale)


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_are_summed_exactly(int8_kernels, kind):
    """One input at a time, by 1, which is 127 times its scale: each weight appears alone."""
    layer, values = layer_of(kind, int8_kernels), WEIGHTS[kind]()[2]
    for count in (1, values.shape[1]):  # rows that are multiplied as they are read, and after it
        error = (
            layer.in_float32(torch.eye(values.shape[1]).bfloat16()[:count]).T - values[:, :count]
        ).abs()
        assert torch.all(error <= 1e-6 * values.abs().amax(1, keepdim=True))


@pytest.mark.parametrize("kind", INTEGERS)
def test_a_row_is_the_same_in_any_batch(int8_kernels, kind):
    layer, x = layer_of(kind, int8_kernels), inputs_of(kind, 230)
    whole = layer.in_float32(x)
    for begin, end in ((0, 1), (5, 7), (3, 20), (100, 200), (7, 104)):
        assert torch.equal(layer.in_float32(x[begin:end]), whole[begin:end])


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "Q8_0", "INT4_64", "int8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [3, 20])
def test_an_input_that_is_not_finite_spoils_its_own_row_only(int8_kernels, kind, bad, rows):
    layer, x = layer_of(kind, int8_kernels), inputs_of(kind, rows)
    good = layer.in_float32(x)
    x[1, 40] = bad
    y = layer.in_float32(x)
    assert y[1].isnan().all()
    others = torch.arange(rows) != 1
    assert torch.equal(y[others], good[others])


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "Q8_0", "INT4_64", "int8"])
@pytest.mark.parametrize("small", [0.0, -0.0, 1e-39, 1e-36])
def test_zeros_and_what_is_hardly_more_give_zeros(int8_kernels, kind, small):
    layer, x = layer_of(kind, int8_kernels), inputs_of(kind, 2)
    x[0] = small
    x[1, BLOCK:] = small  # one block of the row has others
    y = layer.in_float32(x)
    assert not y[0].any()
    assert y[1].any()
    assert y.isfinite().all()


@pytest.mark.parametrize("kind", sorted(FLOATS))
def test_weights_that_are_floats_keep_their_inputs(int8_kernels, kind):
    weight, bits, _ = WEIGHTS[kind]()
    x = inputs_of(kind, 5)
    plain = NativeLinear(weight, None, int8_kernels, bits)
    assert torch.equal(layer_of(kind, int8_kernels).in_float32(x), plain.in_float32(x))


@pytest.mark.parametrize("bits", [16, 12])
def test_weights_in_bf16_keep_their_inputs(int8_kernels, bits):
    weight, x = WEIGHTS["int8"]()[0], inputs_of("int8", 5)
    layers = [NativeLinear(weight, None, int8_kernels, bits, int8_inputs=each) for each in (0, 1)]
    assert torch.equal(layers[0](x), layers[1](x))


@pytest.mark.parametrize("other", ["Q6_K", MXFP4])
def test_parts_of_a_weight_are_all_integers_or_none(int8_kernels, other):
    kinds = ("Q8_0", other)
    parts = [blocks.matrix_of(blocks.random_rows(kind, 128), kind).parts[0] for kind in kinds]
    x = inputs_of("Q8_0", 9)
    layer = NativeLinear(BlockMatrix(parts), None, int8_kernels, int8_inputs=True)
    alone = [
        NativeLinear(BlockMatrix([part]), None, int8_kernels, int8_inputs=other != MXFP4)
        for part in parts
    ]
    assert torch.equal(layer.in_float32(x), torch.cat([each.in_float32(x) for each in alone], 1))
