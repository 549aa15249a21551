"""Weights of a byte each, under the name of the plain weight: fp8 (e4m3) and int8.

The scales are `weight_scale_inv` (DeepSeek's name, although its scales, too, multiply the weights)
or `weight_scale`. A tensor, an output, a group of inputs or a block shares one. Integers may have
zero points. Definition: https://github.com/vllm-project/compressed-tensors (`naive_quantized`).
"""

from __future__ import annotations

from engine.checkpoint.formats.matrix import CodeRows, Levels, QuantizedMatrix
from engine.checkpoint.formats.module_tensors import ModuleTensors, of_rows, scale_shapes
from engine.checkpoint.formats.quantization import PER_TENSOR, Quantization

DTYPES = ("F8_E4M3", "I8")
_SCALES = (".weight_scale_inv", ".weight_scale")


def byte_matrix(stored: ModuleTensors, quantization: Quantization) -> QuantizedMatrix:
    """The matrix of a module whose `weight` has bytes. Raises ModelLoadError."""
    shape = stored.need_matrix(".weight", DTYPES)
    is_float = stored.need(".weight", DTYPES).dtype == "F8_E4M3"
    default = _SCALES[0 if quantization.method == "fp8" else 1]
    suffix = next((each for each in _SCALES if stored.has(each)), default)
    group = stored.need_scales(suffix, quantization.groups_of(8, is_float), shape)
    sharing, zeros = group.sharing, ".weight_zero_point"
    if sharing == PER_TENSOR:
        stored.need_factor(suffix)
    has_zeros = not is_float and (group.has_zeros or stored.has(zeros))
    if has_zeros:
        stored.need(zeros, ("I8",), *scale_shapes(sharing, shape))

    def read(rows: slice) -> CodeRows:
        codes, scales = stored.read(".weight")[rows], stored.scales(suffix, rows, sharing)
        if not has_zeros:
            return CodeRows(codes, scales)
        return CodeRows(codes, scales, of_rows(stored.read(zeros).float(), rows, sharing))

    levels = Levels.E4M3 if is_float else Levels.INT8
    inputs = sharing.inputs or shape[1]
    title = f"{levels.value}, {sharing}"
    return QuantizedMatrix(shape, levels, title, stored.names, inputs, read)
