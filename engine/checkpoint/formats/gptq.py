"""GPTQ's and AWQ's checkpoints: integers packed into words of 32 bits, transposed.

GPTQ packs the codes of neighbouring inputs into a word. AWQ (in the format that it calls "gemm")
packs the codes of eight outputs, in an order of its own. Both pack zero points along outputs.
Version 1 of GPTQ stores zero points minus one. Definitions: https://github.com/AutoGPTQ/AutoGPTQ,
https://github.com/casper-hansen/AutoAWQ.
"""

from __future__ import annotations

import torch

from engine.checkpoint.formats.matrix import CodeRows, Levels, QuantizedMatrix
from engine.checkpoint.formats.module_tensors import SCALE_DTYPES, ModuleTensors, nibbles
from engine.checkpoint.formats.packed_words import WORD_BITS, codes_in, stored_groups
from engine.checkpoint.formats.quantization import Quantization, WeightGroup

_CODES, _ZEROS, _SCALES, _GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"
_AWQ_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""The place of each of eight outputs in its word."""


def gptq_matrix(stored: ModuleTensors, quantization: Quantization) -> QuantizedMatrix:
    """The matrix of a module with GPTQ's tensors. Raises ModelLoadError."""
    num_words, outputs = stored.need_matrix(_CODES, ("I32",))
    num_groups, _ = stored.need_matrix(_SCALES, SCALE_DTYPES)
    group, inputs = _matching_group(stored, quantization, num_words, num_groups)
    bits = group.bits
    size = group.sharing.inputs or inputs
    stored.need(_SCALES, SCALE_DTYPES, (-(-inputs // size), outputs))
    stored.need(_ZEROS, ("I32",), (num_groups, -(-outputs * bits // WORD_BITS)))

    def read(rows: slice) -> CodeRows:
        codes = codes_in(stored.read(_CODES)[:, rows].t(), bits)
        words = slice(rows.start * bits // WORD_BITS, -(-rows.stop * bits // WORD_BITS))
        zeros = codes_in(stored.read(_ZEROS)[:, words], bits)[:, : rows.stop - rows.start]
        scales = stored.read(_SCALES)[:, rows].t().float()
        return CodeRows(codes, scales, zeros.t().float() + quantization.zero_offset)

    levels = Levels.INT4 if bits == 4 else Levels.INT8
    order = stored_groups(stored, _GROUPS, size, (inputs, num_groups))
    if not quantization.has_order:
        order = None
    title = f"GPTQ's {levels.value}, {group.sharing}"
    return QuantizedMatrix((outputs, inputs), levels, title, stored.names, size, read, order)


def _matching_group(
    stored: ModuleTensors, quantization: Quantization, num_words: int, num_groups: int
) -> tuple[WeightGroup, int]:
    """The group that matches the stored shapes, and the number of the matrix's inputs; the first
    group if none matches."""
    found = []
    for group in quantization.groups:
        inputs = num_words * WORD_BITS // group.bits
        found.append((group, inputs))
        if stored.has(_GROUPS) and stored.need(_GROUPS, ("I32", "I64")).shape != (inputs,):
            continue
        if num_groups == -(-inputs // (group.sharing.inputs or inputs)):
            return group, inputs
    return found[0]


def awq_matrix(stored: ModuleTensors, quantization: Quantization) -> QuantizedMatrix:
    """The matrix of a module with AWQ's tensors. Raises ModelLoadError."""
    inputs, num_words = stored.need_matrix(_CODES, ("I32",))
    outputs, sharing = num_words * WORD_BITS // 4, quantization.groups[0].sharing
    size = sharing.inputs or inputs
    num_groups = -(-inputs // size)
    stored.need(_SCALES, SCALE_DTYPES, (num_groups, outputs))
    has_zeros = quantization.groups[0].has_zeros or stored.has(_ZEROS)
    if has_zeros:
        stored.need(_ZEROS, ("I32",), (num_groups, num_words))

    def of_outputs(suffix: str, rows: slice) -> torch.Tensor:
        words = slice(rows.start * 4 // WORD_BITS, -(-rows.stop * 4 // WORD_BITS))
        codes = nibbles(stored.read(suffix)[:, words]).unflatten(1, (-1, 8))
        return codes[:, :, _AWQ_PLACES].flatten(1).t()

    def read(rows: slice) -> CodeRows:
        scales = stored.read(_SCALES)[:, rows].t().float()
        zeros = of_outputs(_ZEROS, rows).float() if has_zeros else torch.full((1, 1), 8.0)
        return CodeRows(of_outputs(_CODES, rows), scales, zeros)

    title = f"AWQ's int4, {sharing}"
    return QuantizedMatrix((outputs, inputs), Levels.INT4, title, stored.names, size, read)
