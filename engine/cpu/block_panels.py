"""Panels of quantized blocks: a checkpoint's blocks, in the order that our kernels read, with their
values unchanged.

Owns the packed panels of a `BlockMatrix`. `native/block_panels.h` defines their layout and packs
them.
"""

from __future__ import annotations

import ctypes

import torch

from engine.checkpoint.quantized_blocks import (
    KIND_NUMBERS,
    PANEL_OUTPUTS,
    BlockMatrix,
    BlockRows,
    fit_panels,
)
from engine.cpu.huge_pages import HugePages


class FileRows(ctypes.Structure):
    """Mirrors FileRows in native/file_blocks.h."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
    )


class _Part(ctypes.Structure):
    """Mirrors BlockPart in native/panels.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("first", ctypes.c_int32),
        ("kind", ctypes.c_int32),
    )


class BlockPanels:
    """The panels of one weight, in `memory`. `parts` is the array that kernels read."""

    def __init__(self, matrix: BlockMatrix, kernels: ctypes.CDLL, memory: HugePages) -> None:
        assert fit_panels(matrix.parts)
        self._kernels = kernels
        self._counts = [part.num_rows for part in matrix.parts]
        self._inputs = matrix.shape[1]
        self._memory: list[torch.Tensor] = []
        self.parts = (_Part * len(matrix.parts))()
        panel_bytes = kernels.baton_block_panel_bytes
        panel_bytes.restype = ctypes.c_int64
        first = 0
        for place, part in enumerate(matrix.parts):
            kind = KIND_NUMBERS[part.kind]
            num_panels = -(-part.num_rows // PANEL_OUTPUTS)
            each = panel_bytes(kind, self._inputs)
            panels = memory.empty((num_panels * each,), torch.uint8)
            self._memory.append(panels)
            self.parts[place] = _Part(panels.data_ptr(), first, kind)
            packed = 0
            for piece in part.pieces():
                to = _Part(panels.data_ptr() + packed // PANEL_OUTPUTS * each, 0, kind)
                _pack(piece, to, kernels)
                packed += piece.num_rows
            first += num_panels

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        return sum(panels.nbytes for panels in self._memory)

    def values(self) -> torch.Tensor:
        """What the panels hold, [outputs, inputs], fp32."""
        values = torch.empty(sum(self._counts), self._inputs)
        for part, some in zip(self.parts, values.split(self._counts), strict=True):
            self._kernels.baton_block_values(
                ctypes.byref(part),
                ctypes.c_int32(self._inputs),
                ctypes.c_int32(len(some)),
                ctypes.c_void_p(some.data_ptr()),
            )
        return values


def _pack(rows: BlockRows, to: _Part, kernels: ctypes.CDLL) -> None:
    """Pack rows into panels, beginning with the first panel of `to`."""
    order = rows.order()
    kernels.baton_pack_blocks(
        ctypes.byref(file_rows(rows)),
        ctypes.c_void_p(order.data_ptr()),
        ctypes.c_int32(len(order)),
        ctypes.byref(to),
    )


class BlockEmbedding:
    """An embedding that stays a mapping of its file's blocks; rows are dequantized when read."""

    def __init__(self, matrix: BlockMatrix, kernels: ctypes.CDLL) -> None:
        (part,) = matrix.parts
        assert isinstance(part, BlockRows)
        assert part.pairs_of_heads is None
        self._part = part  # keeps the mapping
        self._look_up = kernels.baton_block_rows
        self.rows = file_rows(part)
        self.num_tokens = len(part.rows)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The rows of `token_ids` (int64, [N]) as bf16, [N, hidden]. Raises IndexError."""
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < self.num_tokens:
            raise IndexError(f"a token id is outside the vocabulary of {self.num_tokens}")
        token_ids = token_ids.contiguous()
        found = torch.empty((len(token_ids), self.rows.inputs), dtype=torch.bfloat16)
        self._look_up(
            ctypes.byref(self.rows),
            ctypes.c_void_p(token_ids.data_ptr()),
            ctypes.c_int64(len(token_ids)),
            ctypes.c_void_p(found.data_ptr()),
        )
        return found


def file_rows(part: BlockRows) -> FileRows:
    """Where the kernels find the rows. The caller keeps `part` while they read."""
    assert part.rows.is_contiguous()
    return FileRows(part.rows.data_ptr(), part.rows.shape[1], KIND_NUMBERS[part.kind], part.inputs)
