"""Weights that a checkpoint stores in fp8 with a scale per output, as a card multiplies them."""

from __future__ import annotations

import torch

from engine.checkpoint.formats.matrix import Levels
from engine.checkpoint.formats.panel_rows import MatrixRows
from engine.checkpoint.quantized_blocks import BlockMatrix, Matrix, MatrixStack, PanelRows


def stored_codes(weight: Matrix, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The values [outputs, inputs], e4m3, and scales [outputs, 1], fp32, of `weight` on `device`;
    None if some of it is stored in another way."""
    rows = _rows_of(weight)
    if rows is None:
        return None
    values, scales = [], []
    for part in rows:
        if not isinstance(part, MatrixRows) or part.matrix.levels is not Levels.E4M3:
            return None
        for piece in part.matrix.pieces():
            codes = part.matrix.read(piece)
            if codes.scales.shape[1] != 1:
                return None
            values.append(codes.codes.to(device))
            scales.append(codes.scales.expand(len(codes.codes), 1).to(device))
    return _joined(values), torch.cat(scales)


def _rows_of(weight: Matrix) -> list[PanelRows] | None:
    """The parts of a weight; None if one of them is a plain tensor."""
    found: list[PanelRows] = []
    for matrix in weight.parts if isinstance(weight, MatrixStack) else [weight]:
        if not isinstance(matrix, BlockMatrix):
            return None
        found += matrix.parts
    return found


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    """fp8 tensors one under another, by their bytes."""
    return torch.cat([each.view(torch.uint8) for each in values]).view(torch.float8_e4m3fn)
