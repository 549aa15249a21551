"""Quantized blocks in panels: the values of the gguf package bit for bit, and their products."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.formats.panel_rows import gguf_rows
from engine.checkpoint.quantized_blocks import (
    MXFP4,
    QUANTIZED_TYPES,
    BlockMatrix,
    BlockRows,
    MatrixStack,
    together,
)
from engine.cpu.block_panels import BlockEmbedding, BlockPanels
from engine.cpu.huge_pages import HugePages
from engine.cpu.linear import cpu_linear
from engine.cpu.native_linear import NativeLinear
from tests.effort import pairwise, times

KINDS = tuple(QUANTIZED_TYPES)
KINDS_WITH_HALVES = tuple(kind for kind in KINDS if kind != MXFP4)
INPUTS = 512
_SCALES = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}


def random_rows(kind: str, outputs: int, inputs: int = INPUTS, seed: int = 0) -> torch.Tensor:
    """Blocks of random bits, whose scales are finite and of usual sizes."""
    block, chance = QUANTIZED_TYPES[kind], np.random.default_rng(seed)
    blocks = chance.integers(0, 256, (outputs * inputs // block.size, block.num_bytes), np.uint8)
    if kind == MXFP4:
        blocks[:, 0] = chance.integers(115, 125, len(blocks))  # 2^-12 to 2^-3
        return torch.from_numpy(blocks.reshape(outputs, -1))
    for place in _SCALES.get(kind, (0, 2)):
        halves = (chance.standard_normal((len(blocks), 1)) * 0.02).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8)
    return torch.from_numpy(blocks.reshape(outputs, -1))


def matrix_of(rows: torch.Tensor, kind: str) -> BlockMatrix:
    part = gguf_rows(rows, kind)
    assert part is not None
    return BlockMatrix([part])


def expected(rows: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=times(8, 100), deadline=None, derandomize=True)
@given(outputs=st.integers(1, 150), blocks=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_packed_values_are_those_of_the_gguf_package(product_kernels, kind, outputs, blocks, seed):
    rows = random_rows(kind, outputs, blocks * 256, seed)
    panels = BlockPanels(matrix_of(rows, kind), product_kernels, HugePages())
    assert torch.equal(panels.values(), expected(rows, kind))


@pytest.mark.parametrize("kind", KINDS_WITH_HALVES)
def test_halves_that_are_not_normal_keep_their_value(product_kernels, kind):
    rows = random_rows(kind, 64)
    for place in _SCALES.get(kind, (0, 2)):
        rows[:, place : place + 2] = torch.tensor([3, 0], dtype=torch.uint8)  # 3 * 2^-24
    panels = BlockPanels(matrix_of(rows, kind), product_kernels, HugePages())
    assert torch.equal(panels.values(), expected(rows, kind))


def test_the_least_and_largest_powers_of_two_keep_their_value(product_kernels):
    """Beyond fp32 they are infinite; the highest exponent stands for no number, as in OCP's
    Microscaling Formats."""
    rows = random_rows(MXFP4, 6, 32)
    rows[:, 0] = torch.tensor([0, 1, 2, 253, 254, 255], dtype=torch.uint8)
    values = BlockPanels(matrix_of(rows, MXFP4), product_kernels, HugePages()).values()
    with np.errstate(over="ignore"):
        assert torch.equal(values[:5], expected(rows[:5], MXFP4))
    assert values[4].isinf().any()
    assert values[5].isnan().all()


def test_blocks_that_must_become_scaled_codes_are_not_read_as_others(product_kernels):
    matrix = BlockMatrix([BlockRows(random_rows(MXFP4, 64), MXFP4)])
    with pytest.raises(KeyError, match=MXFP4):
        BlockPanels(matrix, product_kernels, HugePages())


@pytest.mark.parametrize("kind", KINDS)
def test_panels_take_few_more_bits_than_the_file(product_kernels, kind):
    """Scales of MXFP4 grow from 8 to 32 bits for each 32 inputs."""
    rows = random_rows(kind, 128)
    layer = NativeLinear(matrix_of(rows, kind), None, product_kernels)
    growth = 5 / 4.25 if kind == MXFP4 else 1.1
    assert layer.num_bytes <= growth * rows.nbytes


@pairwise("kind, rows, biased", KINDS, [0, 1, 2, 6, 7, 16, 17, 33, 97, 200], [False, True])
def test_products_are_those_of_the_values(product_kernels, kind, rows, biased):
    blocks = random_rows(kind, 150)
    matrix = matrix_of(blocks, kind)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, INPUTS, generator=generator).bfloat16()
    bias = torch.randn(150, generator=generator).bfloat16() if biased else None
    layer = NativeLinear(matrix, bias, product_kernels)
    values = expected(blocks, kind).double()
    exact = x.double() @ values.T + (0 if bias is None else bias.double())
    scale = x.double().abs() @ values.abs().T + 1e-6
    assert torch.all((layer.in_float32(x) - exact).abs() < 1e-6 * scale)
    assert torch.all((layer(x) - exact).abs() < 2**-8 * exact.abs() + 1e-6 * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_any_batch(product_kernels, kind):
    layer = NativeLinear(matrix_of(random_rows(kind, 150), kind), None, product_kernels)
    x = torch.randn(230, INPUTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = layer.in_float32(x)
    for begin, end in ((0, 1), (5, 7), (3, 20), (100, 200), (7, 104)):
        assert torch.equal(layer.in_float32(x[begin:end]), whole[begin:end])


def test_parts_of_different_kinds_are_one_weight(product_kernels):
    kinds = ("Q4_K", "Q6_K", "Q8_0")
    parts = [BlockRows(random_rows(kind, 128, seed=i), kind) for i, kind in enumerate(kinds)]
    matrix = together(parts)
    assert isinstance(matrix, BlockMatrix)
    x = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = NativeLinear(matrix, None, product_kernels).in_float32(x)
    each = [NativeLinear(BlockMatrix([part]), None, product_kernels) for part in parts]
    assert torch.equal(whole, torch.cat([layer.in_float32(x) for layer in each], dim=1))


def test_parts_that_share_a_panel_become_layers_of_their_own(product_kernels):
    parts = [BlockRows(random_rows("Q4_0", 40), "Q4_0"), torch.ones(24, INPUTS).bfloat16()]
    matrix = together(parts)
    assert isinstance(matrix, MatrixStack)
    layer = cpu_linear(matrix, torch.ones(64).bfloat16(), product_kernels)
    x = torch.ones(3, INPUTS).bfloat16()
    values = torch.cat([expected(parts[0].rows, "Q4_0"), parts[1].float()])
    exact = x.double() @ values.double().T + 1
    torch.testing.assert_close(layer.in_float32(x).double(), exact, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(layer(x, add=x[:, :64]).double(), exact + 1, rtol=2**-7, atol=0.05)


def test_rows_in_pairs_are_put_in_halves(product_kernels):
    rows = random_rows("Q4_1", 128)
    part = BlockRows(rows, "Q4_1", pairs_of_heads=2)
    panels = BlockPanels(BlockMatrix([part]), product_kernels, HugePages())
    values = expected(rows, "Q4_1")
    order = [h * 64 + 2 * (i % 32) + i // 32 for h in range(2) for i in range(64)]
    assert torch.equal(panels.values(), values[order])
    assert torch.equal(part.dequantized(), values[order])


@pytest.mark.parametrize("kind", KINDS_WITH_HALVES)
def test_an_embedding_reads_its_rows(product_kernels, kind):
    rows = random_rows(kind, 90)
    embedding = BlockEmbedding(matrix_of(rows, kind), product_kernels)
    ids = torch.tensor([0, 89, 7, 7, *range(20)])
    assert torch.equal(embedding(ids), expected(rows, kind)[ids].bfloat16())
    assert embedding(ids[:0]).shape == (0, INPUTS)
    with pytest.raises(IndexError):
        embedding(torch.tensor([90]))
