"""Weights that are rounded at load to blocks of four or five bits, in the formats of GGUF files.

A block is 32 inputs of an output, with a scale and a minimum. `native/rounded_blocks.cpp` chooses
both, for the least squared error. Rows are rounded when they are packed, some at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.checkpoint.quantized_blocks import KIND_NUMBERS, QUANTIZED_TYPES, BlockRows

KINDS = {4: "Q4_1", 5: "Q5_1"}
"""The type of the blocks, by the bits of a code."""
BLOCK_INPUTS = 32
_LARGEST = 65504.0
"""The largest number in fp16, in which a minimum is kept."""
_ROWS_AT_A_TIME = 1024


def can_round(weight: torch.Tensor) -> bool:
    """Whether `weight` [outputs, inputs], bf16, is whole blocks of numbers that fp16 can hold. A
    weight that is not finite counts as one: its block becomes NaN, so that the logits show it."""
    if weight.shape[1] % BLOCK_INPUTS:
        return False
    sizes = (part.abs().nan_to_num(0.0, 0.0).amax() for part in weight.split(_ROWS_AT_A_TIME))
    return all(float(size) <= _LARGEST for size in sizes)


@dataclass(frozen=True)
class RoundedRows:
    """See PanelRows; rows of `weight` [outputs, inputs], bf16, as blocks of `kind`."""

    weight: torch.Tensor
    kind: str
    kernels: ctypes.CDLL

    @property
    def num_rows(self) -> int:
        """See PanelRows."""
        return len(self.weight)

    @property
    def inputs(self) -> int:
        """See PanelRows."""
        return self.weight.shape[1]

    def pieces(self) -> Iterator[BlockRows]:
        """See PanelRows."""
        for some in self.weight.split(_ROWS_AT_A_TIME):
            yield BlockRows(round_rows(some.contiguous(), self.kind, self.kernels), self.kind)

    def dequantized(self) -> torch.Tensor:
        """See PanelRows."""
        return torch.cat([piece.dequantized() for piece in self.pieces()])


def round_rows(
    weight: torch.Tensor,
    kind: str,
    kernels: ctypes.CDLL,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """The blocks of `weight` [rows, inputs], bf16 and contiguous: [rows, bytes], uint8. Squared
    errors of an input count by its `importance` [inputs], fp32, positive and contiguous; None:
    those of all inputs count alike."""
    inputs = weight.shape[1]
    row_bytes = inputs // BLOCK_INPUTS * QUANTIZED_TYPES[kind].num_bytes
    rows = torch.empty(len(weight), row_bytes, dtype=torch.uint8)
    kernels.baton_round(
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_void_p(None if importance is None else importance.data_ptr()),
        ctypes.c_int32(inputs),
        ctypes.c_int32(len(weight)),
        ctypes.c_int32(KIND_NUMBERS[kind]),
        ctypes.c_void_p(rows.data_ptr()),
    )
    return rows
