"""Rewrites a GGUF file with its matrices in another quantized format.

The input values are those of the file's own weights, so a quantized file is quantized a second
time.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from bench.tools.gguf_conversion import finish
from checkpoint.gguf.folder import gguf_folder
from protocol.errors import BatonError

FORMATS = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
"""Formats that the package `gguf` writes."""


def folder_in_format(model: str, name: str, place: Path) -> Path:
    """The folder of a GGUF file that has the weights of the GGUF file `model` in the format `name`;
    both are made below `place`. Raises BatonError."""
    if not model.endswith(".gguf"):
        raise BatonError(f"{model} is no GGUF file, so its weights are not made in other formats")
    target = place / f"{Path(model).stem}-{name}.gguf"
    return gguf_folder(requantized(Path(model), name, target), place)


def requantized(source: Path, name: str, target: Path) -> Path:
    """Write `target`: the model of the file `source`, with matrices in the format `name`. Vectors,
    and matrices whose rows are not whole blocks, stay as they are. Raises BatonError."""
    if name not in FORMATS:
        raise BatonError(f"the format {name!r} is not one of {', '.join(FORMATS)}")
    kind = gguf.GGMLQuantizationType[name]
    block_size, _ = gguf.GGML_QUANT_SIZES[kind]
    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == gguf.Keys.General.ARCHITECTURE:
            continue
        inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = np.asarray(tensor.data)
        if len(tensor.shape) > 1 and tensor.shape[0] % block_size == 0:
            values = quantize(dequantize(values, tensor.tensor_type), kind)
            writer.add_tensor(tensor.name, values, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values, raw_dtype=tensor.tensor_type)
    finish(writer)
    return target
