"""Rounding that spreads each weight's error over the weights behind it.

The measure is the squared error of a product's outputs: for rows e of errors, e @ moments @ e, with
`moments` [inputs, inputs] the mean of x x^T over the inputs x. Inputs are rounded one after the
other; the error of each is compensated, as well as the moments allow, by the weights of the inputs
behind it that are not rounded yet (GPTQ, https://arxiv.org/abs/2210.17323). A block's scale and
minimum are those that `rounded_rows` finds for its compensated weights, by the inputs' own moments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from engine.checkpoint.quantized_blocks import BlockRows
from engine.cpu.rounded_rows import BLOCK_INPUTS, KINDS, round_rows

_DAMPING = 0.01
"""The share of the mean moment that is added to each input's own, so that inputs which hardly occur
in the text, or only together, have a part in the measure."""
_ROWS_AT_A_TIME = 8192
_HALF_BYTES = 2


def moments_of(inputs: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """The damped moments, [width, width], fp32, of `inputs` [N, width] each. Without a row, or with
    zeros only, all inputs count alike."""
    moments, count = torch.zeros(width, width), 0
    for part in inputs:
        wide = part.float()
        moments.addmm_(wide.t(), wide)
        count += len(part)
    moments /= max(count, 1)
    diagonal = moments.diagonal()
    diagonal += _DAMPING * diagonal.mean() if bool(diagonal.any()) else 1.0
    return moments


def output_errors(rounded: BlockRows, weight: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """The measure for each output, [outputs]."""
    errors = rounded.dequantized() - weight.float()
    return ((errors @ moments) * errors).sum(1)


def rounded_for(
    weight: torch.Tensor, moments: torch.Tensor, bits: int, kernels: ctypes.CDLL
) -> BlockRows:
    """`weight` [outputs, inputs], bf16, that `can_round`, as blocks of `bits` per code. No output
    is worse, by its measure, than if each weight were rounded to the nearest level."""
    factor = _compensation(moments)
    found = [
        _better(some.contiguous(), moments, factor, bits, kernels)
        for some in weight.split(_ROWS_AT_A_TIME)
    ]
    return BlockRows(torch.cat(found), KINDS[bits])


def _better(
    weight: torch.Tensor,
    moments: torch.Tensor,
    factor: torch.Tensor,
    bits: int,
    kernels: ctypes.CDLL,
) -> torch.Tensor:
    """Rows of blocks, [outputs, bytes], each compensated or plainly rounded."""
    kind = KINDS[bits]
    plain = BlockRows(round_rows(weight, kind, kernels), kind)
    found = _compensated(weight.float(), moments.diagonal(), factor, bits, kernels)
    ours = BlockRows(found, kind)
    worse = output_errors(ours, weight, moments) > output_errors(plain, weight, moments)
    return torch.where(worse[:, None], plain.rows, ours.rows)


def _compensation(moments: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse moments. Row i, divided by its diagonal, says by
    how much the weights of later inputs make up for an error in input i."""
    lower = torch.linalg.cholesky(moments.double())
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()


def _compensated(
    weight: torch.Tensor,
    importance: torch.Tensor,
    factor: torch.Tensor,
    bits: int,
    kernels: ctypes.CDLL,
) -> torch.Tensor:
    """Rows of blocks, [outputs, bytes], of `weight`, fp32, which is overwritten."""
    blocks, kind = [], KINDS[bits]
    importance = importance / importance.mean()
    for begin in range(0, weight.shape[1], BLOCK_INPUTS):
        end = begin + BLOCK_INPUTS
        left = weight[:, begin:end]
        narrow = left.bfloat16()
        found = round_rows(narrow, kind, kernels, importance[begin:end])  # for its lines
        lines = found[:, : 2 * _HALF_BYTES].clone().view(torch.float16).float()
        scale, minimum = lines[:, :1], lines[:, 1:]
        codes, errors = torch.empty_like(left), torch.empty_like(left)
        for i in range(BLOCK_INPUTS):
            at = slice(i, i + 1)
            codes[:, at] = _codes(left[:, at], scale, minimum, bits)
            value = scale * codes[:, at] + minimum
            errors[:, at] = (left[:, at] - value) / factor[begin + i, begin + i]
            left[:, i + 1 :] -= errors[:, at] * factor[begin + i, begin + i + 1 : end]
        weight[:, end:] -= errors @ factor[begin:end, end:]
        blocks.append(_packed(found[:, : 2 * _HALF_BYTES], codes.to(torch.uint8), bits))
    return torch.cat(blocks, 1)


def _codes(
    weight: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bits: int
) -> torch.Tensor:
    """The nearest levels; 0 where all levels are the same."""
    codes = ((weight - minimum) / scale).round_().clamp_(0, (1 << bits) - 1)
    return torch.where(scale > 0, codes, 0)


def _packed(lines: torch.Tensor, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """A block of each row, [outputs, bytes], as GGUF files have it: its line, the upper bits of
    codes of 5 bits, then the lower bits of the first half beside those of the second."""
    parts = [lines]
    if bits > 4:
        upper = (codes >> 4).unflatten(1, (-1, 8)) << torch.arange(8, dtype=torch.uint8)
        parts.append(upper.sum(2, dtype=torch.uint8))
    first, second = (codes & 15).chunk(2, 1)
    return torch.cat((*parts, first | second << 4), 1)
