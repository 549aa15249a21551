"""Rounding for a text's inputs: never worse by its own measure, better where inputs agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.quantized_blocks import BlockRows
from engine.cpu.rounded_rows import KINDS, round_rows
from engine.rounding.compensation import moments_of, output_errors, rounded_for
from tests.effort import times

BLOCK = 32


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plainly(weight: torch.Tensor, bits: int, kernels) -> BlockRows:
    return BlockRows(round_rows(weight, KINDS[bits], kernels), KINDS[bits])


def inputs_from(sources: int, width: int, seed: int = 1) -> torch.Tensor:
    """[512, width], all of them mixed from a few independent numbers, and a little of their own."""
    mixed = random(seed, 512, sources) @ random(seed + 1, sources, width)
    return mixed + 0.1 * random(seed + 2, 512, width)


@pytest.mark.parametrize("bits", KINDS)
@settings(max_examples=times(10, 60), deadline=None, derandomize=True)
@given(
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 4),
    size=st.sampled_from([1e-3, 0.05, 30.0]),
    sources=st.sampled_from([1, 8, 200]),
)
def test_no_output_is_worse_than_plainly_rounded(
    product_kernels, bits, outputs, blocks, size, sources
):
    weight = (random(outputs, outputs, blocks * BLOCK).pow(3) * size).bfloat16()
    moments = moments_of([inputs_from(sources, blocks * BLOCK)], blocks * BLOCK)
    ours = output_errors(rounded_for(weight, moments, bits, product_kernels), weight, moments)
    theirs = output_errors(plainly(weight, bits, product_kernels), weight, moments)
    assert bool((ours <= theirs).all())


@pytest.mark.parametrize(("bits", "most"), [(4, 0.35), (5, 0.35)])
def test_outputs_of_inputs_that_agree_move_less(product_kernels, bits, most):
    weight = (random(0, 64, 8 * BLOCK) * 0.05).bfloat16()
    x = inputs_from(16, 8 * BLOCK)
    moments = moments_of(x.split(100), 8 * BLOCK)

    def moved(rows: BlockRows) -> float:
        return float((x @ (rows.dequantized() - weight.float()).T).square().sum())

    ours = moved(rounded_for(weight, moments, bits, product_kernels))
    assert ours < most * moved(plainly(weight, bits, product_kernels))


@pytest.mark.parametrize("bits", KINDS)
def test_the_error_of_an_input_is_made_up_for_by_its_twin(product_kernels, bits):
    """Each input of the second block equals one of the first."""
    weight = random(0, 64, 2 * BLOCK).bfloat16()
    x = random(1, 512, BLOCK).repeat(1, 2)
    moments = moments_of([x], 2 * BLOCK)
    found = rounded_for(weight, moments, bits, product_kernels).dequantized() - weight.float()
    first, second = found.chunk(2, 1)
    alone = plainly(weight, bits, product_kernels).dequantized() - weight.float()
    both = (first + second).square().mean()
    assert both < 0.6 * (alone[:, :BLOCK] + alone[:, BLOCK:]).square().mean()


@pytest.mark.parametrize("bits", KINDS)
def test_independent_inputs_count_by_their_moments(product_kernels, bits):
    """They have nothing to make up for: the blocks are those of the search that weighs inputs, but
    for weights in the middle of two levels."""
    weight = random(0, 70, 3 * BLOCK).bfloat16()
    importance = random(1, 3 * BLOCK).square() + 0.1
    ours = rounded_for(weight, torch.diag(importance), bits, product_kernels)
    weighed = round_rows(weight, KINDS[bits], product_kernels, importance)
    assert (ours.rows != weighed).float().mean() < 0.02


@pytest.mark.parametrize("bits", KINDS)
def test_a_dominant_input_is_rounded_best(product_kernels, bits):
    weight = random(0, 64, 2 * BLOCK).bfloat16()
    importance = torch.ones(2 * BLOCK)
    importance[7] = 1000
    ours = rounded_for(weight, torch.diag(importance), bits, product_kernels).dequantized()
    plain = plainly(weight, bits, product_kernels).dequantized()
    ours, plain = ((each - weight.float()).square().mean(0) for each in (ours, plain))
    assert ours[7] < 0.1 * plain[7]
    assert ours[BLOCK:].mean() < 1.001 * plain[BLOCK:].mean()


def test_moments_are_means_over_all_parts():
    x = random(0, 50, BLOCK)
    parts = moments_of(x.bfloat16().split(20), BLOCK)
    wide = x.bfloat16().double()
    exact = wide.T @ wide / 50
    exact.diagonal().add_(0.01 * exact.diagonal().mean())
    torch.testing.assert_close(parts.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inputs", [[], [torch.zeros(4, 2 * BLOCK)]])
def test_inputs_that_never_occur_count_alike(product_kernels, inputs):
    """Those of an expert that no token of the text chose."""
    weight = random(0, 64, 2 * BLOCK).bfloat16()
    moments = moments_of(inputs, 2 * BLOCK)
    assert torch.equal(moments, torch.eye(2 * BLOCK))
    ours = rounded_for(weight, moments, 4, product_kernels)
    assert torch.isfinite(ours.dequantized()).all()
