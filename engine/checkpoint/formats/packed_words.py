"""Integers of 4 or 8 bits, packed along inputs into words of 32 bits (`pack-quantized`).

Codes are unsigned: the integer 0 is stored as 8 (of 4 bits) or 128 (of 8 bits). Zero points are
packed along outputs. If the inputs of a group are not neighbours, `weight_g_idx` has the group of
each input. Definition:
https://github.com/vllm-project/compressed-tensors (`pack_quantized`).
"""

from __future__ import annotations

import torch

from engine.checkpoint.formats.matrix import CodeRows, Levels, QuantizedMatrix
from engine.checkpoint.formats.module_tensors import ModuleTensors, nibbles
from engine.checkpoint.formats.quantization import Quantization

_PACKED, _SHAPE, _SCALE = ".weight_packed", ".weight_shape", ".weight_scale"
_ZEROS, _GROUPS = ".weight_zero_point", ".weight_g_idx"
WORD_BITS = 32


def packed_matrix(stored: ModuleTensors, quantization: Quantization) -> QuantizedMatrix:
    """The matrix of a module with words in `weight_packed`. Raises ModelLoadError."""
    outputs, num_words = stored.need_matrix(_PACKED, ("I32",))
    stored.need(_SHAPE, ("I64", "I32"), (2,))
    counts = stored.read(_SHAPE).tolist()
    inputs = counts[1]
    bits = next((each for each in (4, 8) if num_words == -(-inputs * each // WORD_BITS)), 0)
    groups = quantization.groups_of(bits, is_float=False)
    if counts[0] != outputs or not groups:
        known = sorted({each.bits for each in quantization.groups if not each.is_float})
        raise stored.wrong(
            _PACKED, f"that of {counts} in {' or '.join(map(str, known)) or 'no'} bits"
        )
    shape = (outputs, inputs)
    group = stored.need_scales(_SCALE, groups, shape)
    sharing = group.sharing
    num_groups = sharing.counts(shape)[1]
    has_zeros = group.has_zeros or stored.has(_ZEROS)
    if has_zeros:
        stored.need(_ZEROS, ("I32",), (-(-outputs * bits // WORD_BITS), num_groups))

    def read(rows: slice) -> CodeRows:
        codes = codes_in(stored.read(_PACKED)[rows], bits)[:, :inputs]
        zeros = torch.full((1, 1), 8.0) if bits == 4 else None
        if has_zeros:
            words = slice(rows.start * bits // WORD_BITS, -(-rows.stop * bits // WORD_BITS))
            packed = codes_in(stored.read(_ZEROS)[words].t(), bits)
            zeros = packed[:, : rows.stop - rows.start].t().float()
        return CodeRows(codes, stored.scales(_SCALE, rows, sharing), zeros)

    levels = Levels.INT4 if bits == 4 else Levels.INT8
    size = sharing.inputs or inputs
    order = stored_groups(stored, _GROUPS, size, (inputs, num_groups))
    title = f"{levels.value}, {sharing}"
    return QuantizedMatrix(shape, levels, title, stored.names, size, read, order)


def codes_in(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes in each row of words, lower bits first: codes of 4 bits as uint8, codes of 8 bits
    minus 128 as int8."""
    if bits == 4:
        return nibbles(words)
    return (words.contiguous().view(torch.uint8) ^ 128).view(torch.int8)


def stored_groups(
    stored: ModuleTensors, suffix: str, group_inputs: int, counts: tuple[int, int]
) -> torch.Tensor | None:
    """The group of each input, [inputs] int64, from the tensor with this suffix; None if groups
    are neighbouring inputs. `counts`: the numbers of inputs and of groups. Raises ModelLoadError.
    """
    if not stored.has(suffix):
        return None
    inputs, num_groups = counts
    stored.need(suffix, ("I32", "I64"), (inputs,))
    groups = stored.read(suffix).long()
    if bool((groups == -1).all()):  # writers fill a tensor that is not used with -1
        return None
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise stored.wrong(suffix, f"that with groups from 0 to {num_groups - 1}")
    return None if torch.equal(groups, torch.arange(inputs) // group_inputs) else groups
