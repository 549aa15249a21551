"""Floats of 4 bits (e2m1), two in a byte, lower bits first: MXFP4 and NVFP4.

MXFP4 has one scale per 32 inputs, a power of two. NVFP4 has one scale in fp8 per 16 inputs, and one
scale for the whole tensor, by which compressed-tensors divides and ModelOpt multiplies.
Definitions: OCP's Microscaling Formats; https://github.com/vllm-project/compressed-tensors
(`nvfp4`, `mxfp4`); gpt-oss's `torch/weights.py`.
"""

from __future__ import annotations

from engine.checkpoint.formats.matrix import CodeRows, Levels, QuantizedMatrix
from engine.checkpoint.formats.module_tensors import EXPONENTS, ModuleTensors, as_float, nibbles
from engine.checkpoint.formats.quantization import Quantization

_SCALE, _DIVISOR, _FACTOR = ".weight_scale", ".weight_global_scale", ".weight_scale_2"
_BLOCKS, _BLOCK_SCALES = "_blocks", "_scales"
_MX_INPUTS, _NV_INPUTS = 32, 16


def float4_matrix(stored: ModuleTensors, quantization: Quantization) -> QuantizedMatrix:
    """The matrix of a module with bytes in `weight_packed`, or in `weight` (ModelOpt's). Raises
    ModelLoadError."""
    codes = ".weight_packed" if stored.has(".weight_packed") else ".weight"
    outputs, num_bytes = stored.need_matrix(codes, ("U8",))
    inputs = 2 * num_bytes
    sizes = {each.sharing.inputs for each in quantization.groups_of(4, is_float=True)}
    scale = stored.need(_SCALE, ("F8_E4M3", *EXPONENTS))
    size = _NV_INPUTS if scale.dtype == "F8_E4M3" else _MX_INPUTS
    if size not in sizes:
        raise stored.wrong(codes, f"no {size} inputs with a scale of {scale.dtype}")
    stored.need(_SCALE, (scale.dtype,), (outputs, -(-inputs // size)))
    whole = None
    if size == _NV_INPUTS:
        whole = _FACTOR if codes == ".weight" else _DIVISOR
        stored.need(whole, ("F32",), (1,), (), (1, 1))
        stored.need_factor(whole)

    def read(rows: slice) -> CodeRows:
        scales = as_float(stored.read(_SCALE)[rows])
        if whole == _FACTOR:
            scales = scales * stored.read(whole).item()
        elif whole == _DIVISOR:
            scales = scales / stored.read(whole).item()
        return CodeRows(nibbles(stored.read(codes)[rows]), scales)

    title = f"nvfp4, groups of {size}" if size == _NV_INPUTS else f"mxfp4, groups of {size}"
    return QuantizedMatrix((outputs, inputs), Levels.E2M1, title, stored.names, size, read)


def block_matrix(
    stored: ModuleTensors, quantization: Quantization, half: int | None = None
) -> QuantizedMatrix:
    """The matrices of gpt-oss, [..., outputs, inputs]: `_blocks` of 16 bytes and their `_scales`.
    `half` 0 or 1 takes every second output, the first or the second. Raises ModelLoadError."""
    entry = stored.need(_BLOCKS, ("U8",))
    if len(entry.shape) < 3 or entry.shape[-1] != _MX_INPUTS // 2 or 0 in entry.shape:
        raise stored.wrong(_BLOCKS, "[..., outputs, groups, 16]")
    *leading, num_groups, _ = entry.shape
    step = 1 if half is None else 2
    if leading[-1] % step:
        raise stored.wrong(_BLOCKS, "an even number of outputs")
    stored.need(_BLOCK_SCALES, EXPONENTS, (*leading, num_groups))

    def read(rows: slice) -> CodeRows:
        blocks = stored.read(_BLOCKS).view(-1, num_groups * _MX_INPUTS // 2)
        scales = stored.read(_BLOCK_SCALES).view(-1, num_groups)
        some = slice(rows.start * step + (half or 0), rows.stop * step, step)
        return CodeRows(nibbles(blocks[some]), as_float(scales[some].contiguous()))

    shape = (*leading[:-1], leading[-1] // step, num_groups * _MX_INPUTS)
    return QuantizedMatrix(shape, Levels.E2M1, "mxfp4, groups of 32", stored.names, 32, read)
