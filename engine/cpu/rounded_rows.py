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
_BLOCK_INPUTS = 32
_LARGEST = 65504.0
"""The largest number in fp16, in which a minimum is kept."""
_ROWS_AT_A_TIME = 1024


def can_round(weight: torch.Tensor) -> bool:
    """Whether `weight` [outputs, inputs], bf16, is whole blocks of numbers that fp16 can hold. A
    weight that is not finite counts as one: its block becomes NaN, so that the logits show it."""
    if weight.shape[1] % _BLOCK_INPUTS:
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
            yield BlockRows(self._rounded(some.contiguous()), self.kind)

    def dequantized(self) -> torch.Tensor:
        """See PanelRows."""
        return torch.cat([piece.dequantized() for piece in self.pieces()])

    @property
    def _row_bytes(self) -> int:
        return self.inputs // _BLOCK_INPUTS * QUANTIZED_TYPES[self.kind].num_bytes

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """[rows, bytes], uint8."""
        rows = torch.empty(len(weight), self._row_bytes, dtype=torch.uint8)
        self.kernels.baton_round(
            ctypes.c_void_p(weight.data_ptr()),
            ctypes.c_int32(self.inputs),
            ctypes.c_int32(len(weight)),
            ctypes.c_int32(KIND_NUMBERS[self.kind]),
            ctypes.c_void_p(rows.data_ptr()),
        )
        return rows
