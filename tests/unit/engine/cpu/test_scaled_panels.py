"""Codes of published formats in panels: their values bit for bit, and their products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.checkpoint.formats.matrix import CodeRows, Levels, QuantizedMatrix
from engine.checkpoint.formats.panel_rows import panel_rows
from engine.checkpoint.quantized_blocks import SCALED_TYPES, BlockMatrix
from engine.cpu.block_panels import BlockPanels
from engine.cpu.huge_pages import HugePages
from engine.cpu.native_linear import NativeLinear
from tests.effort import pairwise

OUTPUTS, INPUTS = 150, 192
KINDS = {
    "INT4_32": (Levels.INT4, 96),
    "INT4_64": (Levels.INT4, 64),
    "INT8_64": (Levels.INT8, INPUTS),
    "E2M1_16": (Levels.E2M1, 16),
    "E2M1_32": (Levels.E2M1, 32),
    "E4M3_64": (Levels.E4M3, 128),
}


def matrix_of(kind: str, outputs: int = OUTPUTS, seed: int = 0) -> QuantizedMatrix:
    """Random codes; every one of them occurs."""
    levels, group = KINDS[kind]
    chance = torch.Generator().manual_seed(seed)
    shape = (outputs, -(-INPUTS // group))
    scales = 0.01 + torch.rand(shape, generator=chance)
    zeros = None
    if levels is Levels.INT4:
        zeros = torch.randint(0, 17, shape, generator=chance).float()
    elif levels is Levels.INT8:
        zeros = torch.randint(-128, 129, shape, generator=chance).float()
    count = 16 if levels in (Levels.INT4, Levels.E2M1) else 256
    codes = torch.randint(0, count, (outputs, INPUTS), generator=chance).to(torch.uint8)
    if levels is Levels.INT8:
        codes = codes.view(torch.int8)
    elif levels is Levels.E4M3:
        codes[codes & 127 == 127] = 0  # NaN
        codes = codes.view(torch.float8_e4m3fn)

    def read(rows: slice) -> CodeRows:
        return CodeRows(codes[rows], scales[rows], None if zeros is None else zeros[rows])

    return QuantizedMatrix((outputs, INPUTS), levels, kind, (), group, read)


def blocks_of(matrix: QuantizedMatrix) -> BlockMatrix:
    rows = panel_rows(matrix)
    assert rows is not None
    assert rows.kind == matrix.title
    return BlockMatrix([rows])


def test_all_kinds_are_tested():
    assert set(KINDS) == {each.name for each in SCALED_TYPES.values()}


@pytest.mark.parametrize("kind", KINDS)
def test_packed_values_are_those_of_the_codes(product_kernels, monkeypatch, kind):
    monkeypatch.setattr("engine.checkpoint.formats.matrix._NUMBERS_AT_A_TIME", 64 * INPUTS)
    matrix = matrix_of(kind)
    assert len(list(matrix.pieces())) == 3
    panels = BlockPanels(blocks_of(matrix), product_kernels, HugePages())
    assert torch.equal(panels.values(), matrix.values())


@pairwise("kind, rows, biased", KINDS, [0, 1, 2, 6, 7, 16, 17, 33, 97, 200], [False, True])
def test_products_are_those_of_the_values(product_kernels, kind, rows, biased):
    matrix = matrix_of(kind)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, INPUTS, generator=generator).bfloat16()
    bias = torch.randn(OUTPUTS, generator=generator).bfloat16() if biased else None
    layer = NativeLinear(blocks_of(matrix), bias, product_kernels)
    values = matrix.values().double()
    exact = x.double() @ values.T + (0 if bias is None else bias.double())
    largest = values.abs() + matrix.values().abs().amax(dim=1, keepdim=True)
    scale = x.double().abs() @ largest.T + 1e-6
    assert torch.all((layer.in_float32(x) - exact).abs() < 1e-6 * scale)
    assert torch.all((layer(x) - exact).abs() < 2**-8 * exact.abs() + 1e-6 * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_multiplied_exactly(product_kernels, kind):
    """One weight at a time, by 1: sums hide small codes, which floats store in another way."""
    matrix = matrix_of(kind, outputs=256)
    layer = NativeLinear(blocks_of(matrix), None, product_kernels)
    values = matrix.values()
    for count in (1, INPUTS):  # rows that are multiplied as they are read, and after unpacking
        x = torch.eye(INPUTS).bfloat16()[:count]
        error = (layer.in_float32(x) - values.T[:count]).abs()
        if matrix.levels in (Levels.E2M1, Levels.E4M3):
            assert not error.any()
        else:  # what a code stands for is taken off the sum of a base and the code
            assert torch.all(error <= 2e-6 * 256 * matrix.read(slice(0, 256)).scales.max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_any_batch(product_kernels, kind):
    layer = NativeLinear(blocks_of(matrix_of(kind)), None, product_kernels)
    x = torch.randn(230, INPUTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = layer.in_float32(x)
    for begin, end in ((0, 1), (5, 7), (3, 20), (100, 200), (7, 104)):
        assert torch.equal(layer.in_float32(x[begin:end]), whole[begin:end])


def test_a_code_that_is_no_number_makes_its_output_nan(product_kernels):
    matrix = matrix_of("E4M3_64")
    matrix.read(slice(0, OUTPUTS)).codes.view(torch.uint8)[7, 3] = 0x7F
    layer = NativeLinear(blocks_of(matrix), None, product_kernels)
    y = layer.in_float32(torch.ones(2, INPUTS).bfloat16())
    assert y[:, 7].isnan().all()
    assert not y[:, :7].isnan().any()


@pytest.mark.parametrize(
    ("kind", "group", "inputs"), [("INT4_64", 24, 192), ("E4M3_64", 32, 192), ("INT4_64", 48, 48)]
)
def test_groups_that_are_no_whole_blocks_have_no_panels(kind, group, inputs):
    def no_rows(rows: slice) -> CodeRows:
        pytest.fail("it is not read")

    levels = KINDS[kind][0]
    matrix = QuantizedMatrix((8, inputs), levels, kind, (), group, no_rows)
    assert panel_rows(matrix) is None


def test_groups_that_are_no_neighbours_have_no_panels():
    matrix = matrix_of("INT4_64")
    assert panel_rows(matrix) is not None
    assert panel_rows(replace(matrix, groups=torch.arange(INPUTS) % 3)) is None
