"""Quantized weights as GGUF files hold them: rows of blocks, each with a scale of its own.

A row of a matrix is a whole number of blocks, so rows can be reordered and cut without a loss.
Values are those of the `gguf` package's own dequantization.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from checkpoint.gguf.header import BLOCK_TYPES, PLAIN_TYPES

KIND_NUMBERS = {each.name: number for number, each in BLOCK_TYPES.items()}
"""Of the types, as the files and the kernels number them."""
QUANTIZED_TYPES = {each.name: each for each in BLOCK_TYPES.values() if each.name not in PLAIN_TYPES}
PANEL_OUTPUTS = 64
"""Outputs that the kernels of a CPU multiply together."""
_NUMBERS_AT_A_TIME = 1 << 22
"""Dequantization takes some twenty bytes for each."""


@dataclass(frozen=True)
class BlockRows:
    """Rows of a file's blocks: `rows` [outputs, bytes], uint8, a mapping of the file.

    With `pairs_of_heads`, the rows of each of so many heads lie in the order of rotated pairs (see
    ModelConfig.qk_rows_in_pairs).
    """

    rows: torch.Tensor
    kind: str
    pairs_of_heads: int | None = None

    @property
    def inputs(self) -> int:
        """Numbers in a row."""
        kind = QUANTIZED_TYPES[self.kind]
        return self.rows.shape[1] // kind.num_bytes * kind.size

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
class BlockMatrix:
    """A weight [outputs, inputs] of blocks, in parts of whole rows that may differ in kind."""

    parts: Sequence[BlockRows]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return sum(len(part.rows) for part in self.parts), self.parts[0].inputs

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


def as_tensor(matrix: Matrix) -> torch.Tensor:
    """The values, [outputs, inputs]; of blocks in bf16."""
    if isinstance(matrix, torch.Tensor):
        return matrix
    if isinstance(matrix, BlockMatrix):
        return matrix.dequantized().bfloat16()
    return torch.cat([as_tensor(part) for part in matrix.parts])


def together(parts: Sequence[BlockRows | torch.Tensor | None]) -> BlockMatrix | MatrixStack:
    """Join the parts of one weight, some of them blocks: into one matrix if the kernels can
    multiply it whole, else into a stack."""
    blocks = [part for part in parts if isinstance(part, BlockRows)]
    if len(blocks) == len(parts) and fit_panels(blocks):
        return BlockMatrix(blocks)
    found: list[torch.Tensor | BlockMatrix] = []
    for part in parts:
        assert part is not None
        found.append(BlockMatrix([part]) if isinstance(part, BlockRows) else part)
    return MatrixStack(found)


def fit_panels(parts: Sequence[BlockRows]) -> bool:
    """Whether each part but the last fills whole panels, so that a panel has one kind."""
    return all(len(part.rows) % PANEL_OUTPUTS == 0 for part in parts[:-1])


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


def _parts(matrix: torch.Tensor) -> Iterator[slice]:
    """Slices of the rows that hold a bounded count of numbers each."""
    step = max(_NUMBERS_AT_A_TIME // matrix.shape[1], 1)
    for first in range(0, len(matrix), step):
        yield slice(first, first + step)
