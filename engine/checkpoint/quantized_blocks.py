"""Quantized weights as our kernels take them: rows of blocks, each with a scale of its own.

A row of a matrix is a whole number of blocks, so rows can be reordered and cut without a loss.
Values of a GGUF file's blocks are those of the `gguf` package's own dequantization.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from checkpoint.gguf.header import BLOCK_TYPES, PLAIN_TYPES, BlockType

SCALED_HEAD_BYTES = 8
"""The bytes of a scale and a zero, fp32, at the beginning of a block of scaled codes. A byte for
each code follows."""
SCALED_TYPES = {
    number: BlockType(name, size, SCALED_HEAD_BYTES + size)
    for number, name, size in (
        (64, "INT4_32", 32),
        (65, "INT4_64", 64),
        (66, "INT8_64", 64),
        (67, "E2M1_16", 16),
        (68, "E2M1_32", 32),
        (69, "E4M3_64", 64),
    )
}
"""Blocks with the codes of other formats, by the kernels' numbers. The names give the number of
inputs in a block."""
_TYPES = BLOCK_TYPES | SCALED_TYPES
_TYPES_BY_NAME = {each.name: each for each in _TYPES.values()}
MXFP4 = "MXFP4"
"""A type of GGUF files whose blocks the kernels read as scaled codes."""
KIND_NUMBERS = {
    each.name: number for number, each in _TYPES.items() if each.name not in (*PLAIN_TYPES, MXFP4)
}
"""The numbers that GGUF files and the kernels give to the types whose blocks the kernels read."""
QUANTIZED_TYPES = {each.name: each for each in BLOCK_TYPES.values() if each.name not in PLAIN_TYPES}
"""The quantized types of GGUF files."""
PANEL_OUTPUTS = 64
"""Outputs that the kernels of a CPU multiply together."""
_NUMBERS_AT_A_TIME = 1 << 22
"""The numbers that are dequantized at a time: this takes some twenty bytes for each."""


class PanelRows(Protocol):
    """Rows of a quantized matrix that our kernels pack without a loss."""

    @property
    def kind(self) -> str:
        """The type of the blocks, a name in `KIND_NUMBERS`."""

    @property
    def num_rows(self) -> int:
        """The outputs."""

    @property
    def inputs(self) -> int:
        """Numbers in a row."""

    def pieces(self) -> Iterator[BlockRows]:
        """All rows in order; all pieces but the last are whole panels."""

    def dequantized(self) -> torch.Tensor:
        """The values, [outputs, inputs], fp32."""


class StoredRows(PanelRows, Protocol):
    """Rows of a checkpoint's quantized matrix, of which ranks take parts."""

    @property
    def num_bytes(self) -> int:
        """About how many bytes the rows take in memory."""

    def part(self, rows: slice, inputs: slice) -> StoredRows | None:
        """Some rows and inputs of the matrix; None if they are not whole blocks. If rows lie in
        rotated pairs, the rows must be those of whole heads."""


@dataclass(frozen=True)
class BlockRows:
    """Rows of blocks: `rows` [outputs, bytes], uint8. Rows of a GGUF file are mapped, not read.

    `pairs_of_heads`: number of heads whose rows lie in the order of rotated pairs (see
    ModelConfig.qk_rows_in_pairs); None if no rows do.
    """

    rows: torch.Tensor
    kind: str
    pairs_of_heads: int | None = None

    @property
    def num_rows(self) -> int:
        """See PanelRows."""
        return len(self.rows)

    @property
    def inputs(self) -> int:
        """See PanelRows."""
        kind = _TYPES_BY_NAME[self.kind]
        return self.rows.shape[1] // kind.num_bytes * kind.size

    @property
    def num_bytes(self) -> int:
        """See StoredRows."""
        return self.rows.nbytes

    def pieces(self) -> Iterator[BlockRows]:
        """See PanelRows."""
        yield self

    def part(self, rows: slice, inputs: slice) -> BlockRows | CutRows | None:
        """See StoredRows."""
        kind, heads = _TYPES_BY_NAME[self.kind], self.pairs_of_heads
        first, end, _ = inputs.indices(self.inputs)
        if first % kind.size or end % kind.size:
            return None
        kept = self.rows[rows]
        if heads is not None:
            heads = len(kept) * heads // len(self.rows)
        if end - first == self.inputs:
            return BlockRows(kept, self.kind, heads)
        of_row = slice(*(each // kind.size * kind.num_bytes for each in (first, end)))
        return CutRows(kept[:, of_row], self.kind) if heads is None else None

    def order(self) -> torch.Tensor:
        """The row of each output, [outputs] int64."""
        places = torch.arange(len(self.rows))
        if self.pairs_of_heads is None:
            return places
        return in_halves(places, self.pairs_of_heads).contiguous()

    def dequantized(self) -> torch.Tensor:
        """The values in the order of the outputs, [outputs, inputs], fp32."""
        values = torch.empty(len(self.rows), self.inputs)
        copy_dequantized(self.rows, self.kind, values)
        return values if self.pairs_of_heads is None else in_halves(values, self.pairs_of_heads)


@dataclass(frozen=True)
class CutRows:
    """A part of each row of blocks: `rows` [outputs, bytes], uint8, which need not be contiguous.
    They are copied when they are packed, some at a time."""

    rows: torch.Tensor
    kind: str

    @property
    def num_rows(self) -> int:
        """See PanelRows."""
        return len(self.rows)

    @property
    def inputs(self) -> int:
        """See PanelRows."""
        return BlockRows(self.rows, self.kind).inputs

    @property
    def num_bytes(self) -> int:
        """See StoredRows."""
        return self.rows.nbytes

    def pieces(self) -> Iterator[BlockRows]:
        """See PanelRows."""
        step = max(_NUMBERS_AT_A_TIME // self.inputs // PANEL_OUTPUTS, 1) * PANEL_OUTPUTS
        for some in self.rows.split(step):
            yield BlockRows(some.contiguous(), self.kind)

    def part(self, rows: slice, inputs: slice) -> StoredRows | None:
        """See StoredRows."""
        return BlockRows(self.rows.contiguous(), self.kind).part(rows, inputs)

    def dequantized(self) -> torch.Tensor:
        """See PanelRows."""
        return torch.cat([piece.dequantized() for piece in self.pieces()])


@dataclass(frozen=True)
class BlockMatrix:
    """A weight [outputs, inputs] of blocks, in parts of whole rows that may differ in kind."""

    parts: Sequence[PanelRows]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return sum(part.num_rows for part in self.parts), self.parts[0].inputs

    def dequantized(self) -> torch.Tensor:
        """The values, [outputs, inputs], fp32."""
        return torch.cat([part.dequantized() for part in self.parts])


@dataclass(frozen=True)
class MatrixStack:
    """A weight [outputs, inputs] in parts of whole rows that no single product can take."""

    parts: Sequence[torch.Tensor | BlockMatrix]

    @property
    def counts(self) -> list[int]:
        """The outputs of each part."""
        return [part.shape[0] for part in self.parts]


Matrix = torch.Tensor | BlockMatrix | MatrixStack


def as_tensor(matrix: Matrix, device: torch.device | None = None) -> torch.Tensor:
    """The values, [outputs, inputs], on `device` (default: where they are). Blocks become bf16."""
    if isinstance(matrix, torch.Tensor):
        return matrix.to(device)
    if isinstance(matrix, BlockMatrix):
        return matrix.dequantized().bfloat16().to(device)
    return torch.cat([as_tensor(part, device) for part in matrix.parts])


def together(parts: Sequence[PanelRows | torch.Tensor]) -> BlockMatrix | MatrixStack:
    """Join the parts of one weight, some of them blocks: into one matrix if the kernels can
    multiply it whole, else into a stack."""
    blocks = [part for part in parts if not isinstance(part, torch.Tensor)]
    if len(blocks) == len(parts) and fit_panels(blocks):
        return BlockMatrix(blocks)
    return MatrixStack(
        [part if isinstance(part, torch.Tensor) else BlockMatrix([part]) for part in parts]
    )


def fit_panels(parts: Sequence[PanelRows]) -> bool:
    """Whether each part but the last fills whole panels, so that a panel has one kind."""
    return all(part.num_rows % PANEL_OUTPUTS == 0 for part in parts[:-1])


def in_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k [outputs, ...] that lie in rotated pairs, in the order of halves."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def copy_dequantized(rows: torch.Tensor, kind: str, to: torch.Tensor) -> None:
    """Write the values of `rows` [outputs, bytes], uint8, to `to` [outputs, inputs], in its dtype.

    `kind` is one of `QUANTIZED_TYPES`.
    """
    for part in _parts(to):
        values = dequantize(rows[part].numpy(), GGMLQuantizationType[kind])
        to[part] = torch.from_numpy(np.ascontiguousarray(values)).view(to[part].shape)


def dequantized(rows: torch.Tensor, kind: str, columns: slice) -> torch.Tensor:
    """The values of `rows` [outputs, bytes] in some columns, fp32; see `copy_dequantized`."""
    whole = BlockRows(rows, kind)
    first, end, _ = columns.indices(whole.inputs)
    values = torch.empty(len(rows), end - first)
    for part in _parts(torch.empty(len(rows), whole.inputs, device="meta")):
        some = torch.empty(len(rows[part]), whole.inputs)
        copy_dequantized(rows[part], kind, some)
        values[part] = some[:, first:end]
    return values


def _parts(matrix: torch.Tensor) -> Iterator[slice]:
    """Slices of the rows that hold a bounded count of numbers each."""
    step = max(_NUMBERS_AT_A_TIME // matrix.shape[1], 1)
    for first in range(0, len(matrix), step):
        yield slice(first, first + step)
