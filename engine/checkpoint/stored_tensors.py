"""A checkpoint's tensors as they are stored: those of files in a folder, or another worker's.

`FileTensors` maps them from files: pages are read when touched. Another worker's come in the order
in which they are stored, so a reader asks for them in this order.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from checkpoint.regular_file import open_regular
from engine.checkpoint.files import (
    TensorEntry,
    model_fingerprint,
    place_of,
    read_all_entries,
)
from engine.checkpoint.formats.panel_rows import gguf_rows
from engine.checkpoint.quantized_blocks import QUANTIZED_TYPES, StoredRows
from protocol.errors import ModelLoadError

PLAIN_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types that hold weights as they are."""
_STORED_DTYPES = PLAIN_DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class StoredTensors(Protocol):
    """The tensors of one checkpoint, by Hugging Face's names."""

    @property
    def where(self) -> str:
        """The folder, GGUF file or worker, for messages."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Type, shape and place of each tensor."""

    @property
    def fingerprint(self) -> str:
        """Identifies the checkpoint, see `model_fingerprint`."""

    def read(self, name: str) -> torch.Tensor:
        """A tensor as it is stored; quantized ones as bytes, [outputs, bytes of a row]. Call it in
        the order of the entries' files and places. Raises ModelLoadError, and TransferError if the
        tensors are another worker's."""

    def panel_rows(self, name: str, pairs_of_heads: int | None) -> StoredRows | None:
        """The rows of a quantized matrix that our kernels multiply as it is; None if they do not,
        or if it is not quantized. `pairs_of_heads` as in `BlockRows`."""

    def finish(self) -> None:
        """Note that all wanted tensors have been read."""


OpenTensors = Callable[[], StoredTensors]
"""Opens the tensors of another worker. Raises TransferError."""


class FileTensors:
    """The tensors of the files in a folder, as mappings. Raises ModelLoadError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.where = place_of(folder)
        self.entries = read_all_entries(folder)

    @property
    def fingerprint(self) -> str:
        """See StoredTensors."""
        return model_fingerprint(self._folder)

    def read(self, name: str) -> torch.Tensor:
        """See StoredTensors; the mapping ends with the tensor."""
        entry = self.entries[name]
        start = entry.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        dtype, shape = stored_form(name, entry)
        try:
            with open_regular(entry.file) as file:
                memory = mmap.mmap(
                    file.fileno(), entry.end - start, access=mmap.ACCESS_COPY, offset=start
                )
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read {entry.file}: {error}") from error
        # ACCESS_COPY because torch wants a writable buffer; no code writes to it
        count, offset = math.prod(shape), entry.begin - start
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)

    def panel_rows(self, name: str, pairs_of_heads: int | None) -> StoredRows | None:
        """See StoredTensors; only GGUF files have them."""
        kind = self.entries[name].dtype
        if kind not in QUANTIZED_TYPES:
            return None
        return gguf_rows(self.read(name), kind, pairs_of_heads)

    def finish(self) -> None:
        """Does nothing: each mapping ends with its tensor."""


def stored_form(name: str, entry: TensorEntry) -> tuple[torch.dtype, tuple[int, ...]]:
    """The type and shape of a stored tensor; bytes for one that is quantized. Raises ModelLoadError
    if it has another size."""
    shape = entry.shape
    if entry.dtype in QUANTIZED_TYPES:
        kind = QUANTIZED_TYPES[entry.dtype]
        shape = (*shape[:-1], shape[-1] // kind.size * kind.num_bytes)
    dtype = _STORED_DTYPES.get(entry.dtype, torch.uint8)
    if math.prod(shape) * dtype.itemsize != entry.num_bytes:
        raise ModelLoadError(
            f"{entry.file}: tensor {name!r} has {entry.num_bytes} bytes, which do not hold "
            f"{list(entry.shape)} of {entry.dtype}; the file is corrupt"
        )
    return dtype, shape
