"""Writes a checkpoint's weights in files of safetensors, with an index.

Rounded matrices have the name of their blocks' type in GGUF files as their dtype, which
`engine.checkpoint` reads and other programs refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_INDEX = "model.safetensors.index.json"
_ALIGNMENT = 64
"""Of the first tensor in its file, in bytes; the kernels read blocks from the mapped file."""


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor with its dtype and shape in the file, and its contents."""

    dtype: str
    shape: tuple[int, ...]
    values: torch.Tensor


def write_tensors(file: Path, tensors: Mapping[str, WrittenTensor]) -> None:
    """Write `file`, in the format of safetensors
    (https://github.com/huggingface/safetensors)."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.values.nbytes
        header[name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, end)
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            values = tensor.values.contiguous().flatten().view(torch.uint8)
            stream.write(values.numpy().data)


def write_index(folder: Path, files: Mapping[str, str]) -> None:
    """Write the index of a checkpoint; `files` has the name of each tensor's file."""
    size = sum((folder / name).stat().st_size for name in set(files.values()))
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / _INDEX).write_text(json.dumps(index, indent=2))
