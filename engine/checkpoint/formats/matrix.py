"""A quantized matrix of any format: codes, and the scales and zero points that neighbouring weights
share.

A weight is `(level(code) - zero) * scale`, in fp32. Rows are read from the files when asked for, so
a matrix takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch

_NUMBERS_AT_A_TIME = 1 << 22
"""The numbers that are decoded at a time: decoding takes some twenty bytes for each."""
_ROWS_STEP = 64
"""Rows are read from a multiple of this number on."""
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1_LEVELS = torch.cat([_E2M1, -_E2M1])


class Levels(Enum):
    """The meaning of codes."""

    INT4 = "int4"  # uint8 from 0 to 15
    INT8 = "int8"  # int8
    E2M1 = "fp4"  # uint8 from 0 to 15: a sign, two bits of exponent, one of mantissa
    E4M3 = "fp8"  # float8_e4m3fn


@dataclass(frozen=True)
class CodeRows:
    """Some rows of a matrix: `codes` [rows, inputs] as `Levels` says, and fp32 `scales` and `zeros`
    [rows, groups]; no zeros where all are 0."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight of `shape` [..., outputs, inputs]; all but inputs count as rows.

    `group_inputs` neighbours share a scale, unless `groups` [inputs] says which scale each input
    has. `names` are the stored tensors; `read` decodes rows from the first to the last, whose first
    one is a multiple of 64.
    """

    shape: tuple[int, ...]
    levels: Levels
    title: str
    names: tuple[str, ...]
    group_inputs: int
    read: Callable[[slice], CodeRows]
    groups: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """The number of outputs, over all leading dimensions."""
        return int(torch.Size(self.shape[:-1]).numel())

    def pieces(self) -> Iterator[slice]:
        """Slices of rows, each of a bounded count of numbers."""
        step = max(_NUMBERS_AT_A_TIME // self.shape[-1] // _ROWS_STEP, 1) * _ROWS_STEP
        for first in range(0, self.num_rows, step):
            yield slice(first, min(first + step, self.num_rows))

    def part(self, rows: slice, inputs: slice) -> QuantizedMatrix | None:
        """Some rows and inputs of a matrix of two dimensions; None if these are not whole groups,
        or if the format does not read rows from the first of them on."""
        first_row, end_row, _ = rows.indices(self.num_rows)
        first, end, _ = inputs.indices(self.shape[-1])
        group = self.group_inputs
        is_all = end - first == self.shape[-1]
        has_one_group = self.groups is None and group >= self.shape[-1]
        fits = has_one_group or (self.groups is None and first % group == end % group == 0)
        if first_row % _ROWS_STEP or not (is_all or fits):
            return None

        def shared(numbers: torch.Tensor | None) -> torch.Tensor | None:
            if numbers is None or is_all or numbers.shape[1] == 1:
                return numbers
            return numbers[:, first // group : end // group]

        def read(some: slice) -> CodeRows:
            whole = self.read(slice(first_row + some.start, first_row + some.stop))
            scales = shared(whole.scales)
            assert scales is not None
            return CodeRows(whole.codes[:, first:end], scales, shared(whole.zeros))

        return replace(self, shape=(end_row - first_row, end - first), read=read)

    def values(self) -> torch.Tensor:
        """The weights, `shape`, fp32."""
        values = torch.empty(self.num_rows, self.shape[-1])
        for rows in self.pieces():
            self._decode(self.read(rows), values[rows])
        return values.view(self.shape)

    def _decode(self, rows: CodeRows, to: torch.Tensor) -> None:
        if self.levels is Levels.E2M1:
            torch.index_select(_E2M1_LEVELS, 0, rows.codes.flatten().int(), out=to.view(-1))
        else:
            to.copy_(rows.codes)
        if rows.zeros is not None:
            to.sub_(self._spread(rows.zeros))
        to.mul_(self._spread(rows.scales))

    def _spread(self, shared: torch.Tensor) -> torch.Tensor:
        """Values that groups share [rows, groups], repeated for each input."""
        if shared.shape[1] == 1:
            return shared
        if self.groups is not None:
            return shared[:, self.groups]
        return shared.repeat_interleave(self.group_inputs, dim=1)[:, : self.shape[-1]]
