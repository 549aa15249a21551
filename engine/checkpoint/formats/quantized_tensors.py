"""A quantized checkpoint's tensors by the names of plain weights.

The stored tensors decide how a weight is read: a weight in bf16 is taken as it is, whatever the
configuration's lists of modules say. Weights are checked by the headers before any is read.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from engine.checkpoint.files import TensorEntry
from engine.checkpoint.formats.byte_weights import DTYPES, byte_matrix
from engine.checkpoint.formats.float4 import block_matrix, float4_matrix
from engine.checkpoint.formats.gptq import awq_matrix, gptq_matrix
from engine.checkpoint.formats.matrix import QuantizedMatrix
from engine.checkpoint.formats.module_tensors import ModuleTensors
from engine.checkpoint.formats.packed_words import packed_matrix
from engine.checkpoint.formats.panel_rows import panel_rows
from engine.checkpoint.formats.quantization import Quantization
from engine.checkpoint.quantized_blocks import StoredRows
from engine.checkpoint.stored_tensors import StoredTensors
from protocol.errors import ModelLoadError

logger = logging.getLogger(__name__)

_Reader = Callable[[ModuleTensors, Quantization], QuantizedMatrix]
_SUFFIX = ".weight"
_BY_WORDS: dict[str, _Reader] = {"awq": awq_matrix, "gptq": gptq_matrix}
"""The readers of `qweight`, by method."""
_OF_ACTIVATIONS = re.compile(
    r"\.((in|out)put_(global_)?(scale(_ub)?|zero_point)|activation_scale)$|_proj_activation_scale$"
)
_OF_KV = re.compile(r"\.(q|k|v|kv|prob)_(scale|zero_point)$")
_HALF = re.compile(r"(.+)\.(gate|up)_proj")
_ORPHANS = {
    ".qweight": (".qzeros", ".scales", ".g_idx"),
    "_blocks": ("_scales",),
    ".weight_packed": (".weight_shape", ".weight_global_scale"),
    ".weight": (".weight_scale", ".weight_scale_inv"),
}
"""Tensors that are useless without the tensor named by the key."""


class QuantizedTensors:
    """The stored `tensors`; those of the `wanted` weights that are quantized are read as fp32.
    Raises ModelLoadError."""

    def __init__(
        self, tensors: StoredTensors, quantization: Quantization, wanted: Collection[str]
    ) -> None:
        self._tensors = tensors
        self.where = tensors.where
        self._num_packed = 0
        self.matrices: dict[str, QuantizedMatrix] = {}
        self.entries: dict[str, TensorEntry] = dict(tensors.entries)
        for name in wanted:
            module = ModuleTensors(tensors, name.removesuffix(_SUFFIX))
            reader = _reader(tensors, name, quantization)
            if reader is None:
                continue
            matrix = self.matrices[name] = reader(module, quantization)
            for each in matrix.names:
                self.entries.pop(each, None)
            main = tensors.entries[matrix.names[0]]
            self.entries[name] = replace(main, dtype="F32", shape=matrix.shape)
        self._log_quantization(quantization)

    @property
    def fingerprint(self) -> str:
        """See StoredTensors; covers the configuration, hence the format."""
        return self._tensors.fingerprint

    def read(self, name: str) -> torch.Tensor:
        """See StoredTensors; in any order."""
        matrix = self.matrices.get(name)
        return self._tensors.read(name) if matrix is None else matrix.values()

    def panel_rows(self, name: str, pairs_of_heads: int | None) -> StoredRows | None:
        """See StoredTensors."""
        matrix = self.matrices.get(name)
        if matrix is None or pairs_of_heads is not None:
            return None
        rows = panel_rows(matrix)
        if rows is not None:
            self._num_packed += 1
        return rows

    def finish(self) -> None:
        """See StoredTensors."""
        self._tensors.finish()
        logger.info(
            "%s: %d quantized matrices are multiplied as they are, %d are dequantized",
            self.where, self._num_packed, len(self.matrices) - self._num_packed,
        )  # fmt: skip

    def _log_quantization(self, quantization: Quantization) -> None:
        """Log which matrices are quantized, and which settings are not used."""
        for title, count in Counter(each.title for each in self.matrices.values()).items():
            logger.info("%s: %d matrices are %s", self.where, count, title)
        scales = [name for name in self.entries if _OF_ACTIVATIONS.search(name)]
        of_kv = [name for name in self.entries if _OF_KV.search(name)]
        if quantization.activations or scales:
            logger.info(
                "%s: activations are not quantized (the checkpoint's scheme: %s)",
                self.where, quantization.activations or "static scales",
            )  # fmt: skip
        for name in scales + of_kv:
            del self.entries[name]


def _reader(tensors: StoredTensors, name: str, quantization: Quantization) -> _Reader | None:
    """The reader of the weight `name`; None if it is not quantized. Raises ModelLoadError."""
    entries, module = tensors.entries, name.removesuffix(_SUFFIX)
    plain = entries.get(name)
    if plain is not None:
        if plain.dtype in DTYPES:
            return byte_matrix
        return float4_matrix if plain.dtype == "U8" else None
    if packed := entries.get(f"{module}.weight_packed"):
        return float4_matrix if packed.dtype == "U8" else packed_matrix
    if words := entries.get(f"{module}.qweight"):
        if quantization.method not in _BY_WORDS:
            raise ModelLoadError(
                f"{words.file}: tensor '{module}.qweight' is GPTQ's or AWQ's, but 'quant_method' "
                f"is {quantization.method!r}"
            )
        return _BY_WORDS[quantization.method]
    if f"{module}_blocks" in entries:
        return block_matrix
    if pair := _HALF.fullmatch(module):
        both = f"{pair[1]}.gate_up_proj"
        if f"{both}_blocks" in entries:
            half = 0 if pair[2] == "gate" else 1
            return lambda _, known: block_matrix(ModuleTensors(tensors, both), known, half)
    for missing, others in _ORPHANS.items():
        if any(module + other in entries for other in others):
            raise ModelLoadError(f"{tensors.where}: tensor {module + missing!r} is missing")
    return None
