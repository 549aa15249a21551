"""A checkpoint's files and the fingerprint that identifies the checkpoint; imports no torch.

Owns the list of the safetensors files and their headers, and the fingerprint that two workers
compare. Does not know what the tensors mean. The fingerprint depends only on the content: it is
the same on every host and for every path.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.json_keys import JsonKeys, read_json_object
from protocol.errors import ModelLoadError

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_SAMPLE_BYTES = 256


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a safetensors file; `begin` and `end` are byte offsets into the file."""

    file: Path
    dtype: str  # as the format spells it: F32, BF16, ...
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Size in the file, in bytes."""
        return self.end - self.begin


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files, sharded or single, sorted; ModelLoadError if none."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not index.exists():
        if single.exists():
            return [single]
        raise ModelLoadError(
            f"{folder} holds no weights: expected model.safetensors, or "
            f"{index.name} and its shards (other formats are not supported)"
        )
    keys = JsonKeys(read_json_object(index), str(index))
    weight_map = keys.table("weight_map")
    names = set(weight_map.values.values()) if weight_map else set()
    if not names or not all(isinstance(name, str) for name in names):
        raise keys.wrong("weight_map", "an object that maps tensor names to file names")
    files = [folder / name for name in sorted(names)]
    for file in files:
        if file.parent != folder or not file.exists():
            raise ModelLoadError(f"{index} names {file.name!r}, which is not in {folder}")
    return files


def read_tensor_entries(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name, from its header; ModelLoadError if malformed.

    Format: 8 bytes of little-endian header length, the header (JSON), then the tensors' bytes
    (https://github.com/huggingface/safetensors).
    """
    header = _read_header(file)
    data_start = 8 + len(header)
    file_size = file.stat().st_size
    try:
        table: dict[str, dict[str, Any]] = json.loads(header)
        table.pop("__metadata__", None)
        entries = {
            name: TensorEntry(
                file=file,
                dtype=str(entry["dtype"]),
                shape=tuple(int(size) for size in entry["shape"]),
                begin=data_start + int(entry["data_offsets"][0]),
                end=data_start + int(entry["data_offsets"][1]),
            )
            for name, entry in table.items()
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelLoadError(f"{file}: the safetensors header is malformed ({error})") from error
    for name, tensor in entries.items():
        if not data_start <= tensor.begin <= tensor.end <= file_size:
            raise ModelLoadError(
                f"{file}: tensor {name!r} lies outside the file ({file_size} bytes); "
                "the file is truncated or corrupt"
            )
    return entries


def model_fingerprint(folder: Path) -> str:
    """32 hex digits that identify the checkpoint in `folder`: its configuration and weights.

    Digests config.json and, for each weight file, its name, size, header, and samples at the
    start, middle and end of every tensor. This takes milliseconds; a digest of all weights takes
    minutes. The fingerprint detects wrong checkpoints and versions; it does not detect forgery.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        _update(digest, (folder / "config.json").read_bytes())
    except OSError as error:
        raise ModelLoadError(f"cannot read {folder / 'config.json'}: {error.strerror}") from error
    for file in weight_files(folder):
        _update(digest, file.name.encode())
        _update(digest, str(file.stat().st_size).encode())
        _update(digest, _read_header(file))
        with file.open("rb") as stream:
            for name, tensor in sorted(read_tensor_entries(file).items()):
                _update(digest, name.encode())
                middle = (tensor.begin + tensor.end - _SAMPLE_BYTES) // 2
                for start in (tensor.begin, middle, tensor.end - _SAMPLE_BYTES):
                    start = max(start, tensor.begin)
                    stream.seek(start)
                    _update(digest, stream.read(min(_SAMPLE_BYTES, tensor.end - start)))
    return digest.hexdigest()


def _update(digest: hashlib.blake2b, part: bytes) -> None:
    """Adds `part` with its length, so that the boundaries between parts are unambiguous."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _read_header(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = stream.read(size) if size <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        raise ModelLoadError(f"cannot read {file}: {error.strerror}") from error
    if not header or len(header) != size:
        raise ModelLoadError(f"{file} is not a safetensors file, or is truncated")
    return header
