"""Quantized matrices as rows of blocks of scaled codes, which our kernels pack into panels.

A block is a scale and a zero in fp32, and a byte for each code (`SCALED_TYPES`); values stay the
same, bit for bit. Rows are made when they are packed, some at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.checkpoint.formats.matrix import CodeRows, Levels, QuantizedMatrix
from engine.checkpoint.quantized_blocks import MXFP4, SCALED_HEAD_BYTES, BlockRows, StoredRows

_BLOCKS = {
    Levels.INT4: ("INT4", (64, 32), 4),
    Levels.INT8: ("INT8", (64,), 8),
    Levels.E2M1: ("E2M1", (32, 16), 4),
    Levels.E4M3: ("E4M3", (64,), 8),
}
"""For each level: the name, the numbers of inputs that a block may have (largest first), and the
bits of a code."""
_MXFP4_INPUTS, _MXFP4_BYTES = 32, 17
_PACKED_HEAD_BYTES = 6
"""The bytes that a scale and a zero take in a panel."""


@dataclass(frozen=True)
class MatrixRows:
    """See StoredRows; rows of `matrix` in blocks of `block` inputs."""

    matrix: QuantizedMatrix
    block: int

    @property
    def kind(self) -> str:
        """See StoredRows."""
        return f"{_BLOCKS[self.matrix.levels][0]}_{self.block}"

    @property
    def num_rows(self) -> int:
        """See StoredRows."""
        return self.matrix.num_rows

    @property
    def inputs(self) -> int:
        """See StoredRows."""
        return self.matrix.shape[-1]

    @property
    def num_bytes(self) -> int:
        """See StoredRows."""
        bits = _BLOCKS[self.matrix.levels][2]
        block_bytes = _PACKED_HEAD_BYTES + self.block * bits // 8
        return self.num_rows * self.inputs // self.block * block_bytes

    def pieces(self) -> Iterator[BlockRows]:
        """See StoredRows."""
        for rows in self.matrix.pieces():
            yield BlockRows(self._in_blocks(self.matrix.read(rows)), self.kind)

    def part(self, rows: slice, inputs: slice) -> MatrixRows | None:
        """See StoredRows."""
        first, end, _ = inputs.indices(self.inputs)
        matrix = self.matrix.part(rows, inputs)
        if matrix is None or first % self.block or end % self.block:
            return None
        return MatrixRows(matrix, self.block)

    def dequantized(self) -> torch.Tensor:
        """See StoredRows."""
        return self.matrix.values()

    def _in_blocks(self, rows: CodeRows) -> torch.Tensor:
        """[rows, bytes], uint8."""
        codes = rows.codes.contiguous().view(torch.uint8).unflatten(1, (-1, self.block))
        blocks = torch.zeros(
            (*codes.shape[:2], SCALED_HEAD_BYTES + self.block), dtype=torch.uint8
        )  # [rows, blocks of a row, bytes]
        blocks[:, :, :4] = _as_bytes(self._of_blocks(rows.scales), codes)
        if rows.zeros is not None:
            blocks[:, :, 4:SCALED_HEAD_BYTES] = _as_bytes(self._of_blocks(rows.zeros), codes)
        blocks[:, :, SCALED_HEAD_BYTES:] = codes
        return blocks.flatten(1)

    def _of_blocks(self, shared: torch.Tensor) -> torch.Tensor:
        """Values that groups share [rows, groups], repeated for each block; both dimensions may be
        1."""
        if shared.shape[1] == 1:
            return shared
        firsts = torch.arange(0, self.inputs, self.block)
        return shared[:, firsts // self.matrix.group_inputs]


def panel_rows(matrix: QuantizedMatrix) -> MatrixRows | None:
    """The rows of a matrix for our kernels; None if its groups are not whole blocks."""
    inputs = matrix.shape[-1]
    has_one_group = matrix.group_inputs >= inputs
    if len(matrix.shape) != 2 or (matrix.groups is not None and not has_one_group):
        return None
    for block in _BLOCKS[matrix.levels][1]:
        if inputs % block == 0 and (has_one_group or matrix.group_inputs % block == 0):
            return MatrixRows(matrix, block)
    return None


def gguf_rows(
    stored: torch.Tensor, kind: str, pairs_of_heads: int | None = None
) -> StoredRows | None:
    """The rows for our kernels of a GGUF file's quantized matrix [outputs, bytes], uint8; None if
    they do not take them. `pairs_of_heads` as in `BlockRows`."""
    if kind != MXFP4:
        return BlockRows(stored, kind, pairs_of_heads)
    return _mxfp4_rows(stored) if pairs_of_heads is None else None


def _mxfp4_rows(stored: torch.Tensor) -> MatrixRows | None:
    """Blocks are an exponent and 16 bytes, whose lower halves are the block's first 16 codes, and
    whose upper ones the others."""
    blocks = stored.unflatten(1, (-1, _MXFP4_BYTES))

    def read(rows: slice) -> CodeRows:
        exponents, codes = blocks[rows, :, 0].contiguous(), blocks[rows, :, 1:]
        codes = torch.cat((codes & 15, codes >> 4), dim=-1).flatten(1)
        return CodeRows(codes, exponents.view(torch.float8_e8m0fnu).float())

    shape = (len(stored), blocks.shape[1] * _MXFP4_INPUTS)
    return panel_rows(QuantizedMatrix(shape, Levels.E2M1, "mxfp4", (), _MXFP4_INPUTS, read))


def _as_bytes(numbers: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """fp32 numbers for all blocks, [rows, blocks, 4]."""
    every = numbers.float().expand(codes.shape[:2]).contiguous()
    return every.view(torch.uint8).unflatten(1, (-1, 4))
