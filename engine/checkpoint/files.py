"""A checkpoint's files and the fingerprint that identifies the checkpoint; imports no torch.

Owns the list of the weights' files (safetensors or GGUF) and their headers, and the fingerprint
that two workers compare. Does not know what the tensors mean. The fingerprint depends only on the
content: it is the same on every host and for every path.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from checkpoint.gguf.folder import LINK_NAME, SUFFIX
from checkpoint.gguf.header import read_header
from checkpoint.json_keys import JsonKeys, read_json_object
from checkpoint.regular_file import is_there, open_regular, read_small
from engine.checkpoint.expert_tensors import one_by_one
from engine.checkpoint.gguf_names import hugging_face_name, matrix_shape
from protocol.errors import ModelLoadError

logger = logging.getLogger(__name__)

# 100,000 tensors and more; the format's own limit is four times that.
_MAX_HEADER_BYTES = 25_000_000
_MAX_INDEX_BYTES = 64 * 1024 * 1024
_SHARD_NAME = re.compile(r"[^/\0]+\.safetensors")
_MAX_ENTRIES, _MAX_ALL_ENTRIES = 1 << 18, 1 << 20
"""The most tensors of a file, and of all files. The tensors of each expert count."""
_SAMPLE_BYTES = 256
_INDEX = "model.safetensors.index.json"
_MAX_KEPT_HEADERS = 32
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class _Tensor(msgspec.Struct):
    """A tensor in the header of a file; offsets from the header's end."""

    dtype: Annotated[str, msgspec.Meta(pattern=r"^[A-Z0-9_]{1,16}\Z")]
    shape: Annotated[list[_Size], msgspec.Meta(max_length=16)]
    data_offsets: tuple[_Size, _Size]


_decode_tensor = msgspec.json.Decoder(_Tensor).decode


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a file of weights; `begin` and `end` are byte offsets into the file."""

    file: Path
    dtype: str  # the format's own name: F32, BF16, Q4_1, ...
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Size in the file, in bytes."""
        return self.end - self.begin


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's files of weights, sharded or single, sorted: safetensors, or the links to
    GGUF files that `checkpoint.gguf` made; ModelLoadError if there are none."""
    return _files_in(folder, _weight_map(folder))


def _files_in(folder: Path, weight_map: Mapping[str, str]) -> list[Path]:
    if names := set(weight_map.values()):
        return [folder / name for name in sorted(names)]
    single = folder / "model.safetensors"
    if is_there(single):
        return [single]
    if links := sorted(folder.glob(LINK_NAME.replace("{:05}", "[0-9]" * 5))):
        return links
    raise ModelLoadError(
        f"{folder} holds no weights: expected {single.name}, or {_INDEX} and its shards (other "
        "formats are not supported)"
    )


def _weight_map(folder: Path) -> dict[str, str]:
    """The index's file names by tensor; empty without an index. Raises ModelLoadError."""
    index = folder / _INDEX
    if not is_there(index):
        return {}
    keys = JsonKeys(read_json_object(index, _MAX_INDEX_BYTES), str(index))
    table = keys.table("weight_map")
    found = dict(table.values) if table else {}
    if not found or not all(isinstance(name, str) for name in found.values()):
        raise keys.wrong("weight_map", "an object that maps tensor names to file names")
    for name in sorted(set(found.values())):
        if _SHARD_NAME.fullmatch(name) is None:
            raise ModelLoadError(
                f"{index} names {name!r}, which is not a safetensors file beside it"
            )
        if not is_there(folder / name):
            raise ModelLoadError(f"{index} names {name!r}, which is not in {folder}")
    return found


def place_of(folder: Path) -> str:
    """The name of a folder's checkpoint in messages, with its index, which decides which tensors
    there are. A GGUF file has its own name; if there are several parts, the first one's."""
    weight_map = _weight_map(folder)
    first = _files_in(folder, weight_map)[0]
    if first.suffix == SUFFIX:
        return os.path.realpath(first)
    return f"{folder} ({_INDEX})" if weight_map else str(folder)


def read_all_entries(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of all of a folder's files, by the names of `read_tensor_entries`. Raises
    ModelLoadError."""
    found: dict[str, TensorEntry] = {}
    for file, entries in _entries_by_file(folder).items():
        for name in found.keys() & entries.keys():
            raise ModelLoadError(
                f"{file}: tensor {name!r} is in {found[name].file.name}, too, and {_INDEX} names "
                "neither file for it"
            )
        found |= entries
        if len(found) > _MAX_ALL_ENTRIES:
            raise ModelLoadError(f"{folder} has more than {_MAX_ALL_ENTRIES} tensors")
    return found


def _entries_by_file(folder: Path) -> dict[Path, dict[str, TensorEntry]]:
    """The tensors of each file. An index decides which of them count, because shards that another
    checkpoint lent may have more tensors: those that it lists, in the file that it names or, if
    that file lacks the tensor, in another."""
    weight_map = _weight_map(folder)
    stored = {file: _stored_entries(file) for file in _files_in(folder, weight_map)}
    if not weight_map:
        return {file: _with_experts(file, entries) for file, entries in stored.items()}
    by_name = {file.name: entries for file, entries in stored.items()}

    def counts(name: str, file: Path) -> bool:
        place = weight_map.get(name)
        return place is not None and (place == file.name or name not in by_name[place])

    found = {}
    for file, entries in stored.items():
        listed = {name: entry for name, entry in entries.items() if counts(name, file)}
        if len(listed) < len(entries):
            left = min(entries.keys() - listed.keys())
            logger.info(
                "%s: %d tensors, such as %r, are left out: %s does not assign them to this file",
                file, len(entries) - len(listed), left, _INDEX,
            )  # fmt: skip
        found[file] = _with_experts(file, listed)
    return found


def read_tensor_entries(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by Hugging Face's names, from its header; ModelLoadError if malformed.
    Tensors of all experts are entries for each (see `expert_tensors`)."""
    return _with_experts(file, _stored_entries(file))


def _stored_entries(file: Path) -> Mapping[str, TensorEntry]:
    """The tensors as the file has them.

    Format of safetensors: 8 bytes of little-endian header length, the header (JSON), then the
    tensors' bytes (https://github.com/huggingface/safetensors).
    """
    if file.suffix == SUFFIX:
        return _gguf_header(file)[1]
    header, file_size = _read_header(file)
    data_start = 8 + len(header)
    entries = {
        name: TensorEntry(
            file=file,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            begin=data_start + tensor.data_offsets[0],
            end=data_start + tensor.data_offsets[1],
        )
        for name, tensor in _parse_header(file, header).items()
    }
    end, previous = data_start, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if not data_start <= entry.begin <= entry.end <= file_size:
            raise ModelLoadError(
                f"{file}: tensor {name!r} lies outside the file ({file_size} bytes); "
                "the file is truncated or corrupt"
            )
        if entry.begin < end and entry.num_bytes:
            raise ModelLoadError(
                f"{file}: tensors {previous!r} and {name!r} share bytes; the file is corrupt"
            )
        end, previous = entry.end, name
    return entries


def _with_experts(file: Path, stored: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors, with one entry for each expert if a stored tensor holds all experts of a
    layer."""
    entries: dict[str, TensorEntry] = {}
    for stored_name, entry in stored.items():
        names, shape = one_by_one(stored_name, entry.shape)
        size = entry.num_bytes // len(names)
        if size * len(names) != entry.num_bytes or len(entries) + len(names) > _MAX_ENTRIES:
            raise ModelLoadError(
                f"{file}: tensor {stored_name!r} cannot be split into one equal part per expert"
            )
        for place, name in enumerate(names):
            if name in entries:
                raise ModelLoadError(f"{file}: tensor {name!r} is there twice")
            begin = entry.begin + place * size
            entries[name] = replace(entry, shape=shape, begin=begin, end=begin + size)
    return entries


def _gguf_header(file: Path) -> tuple[int, dict[str, TensorEntry]]:
    """The header's size in bytes, and the tensors."""
    status = file.stat() if file.exists() else None
    return _read_gguf(file, None if status is None else (status.st_ino, status.st_mtime_ns))


@functools.lru_cache(maxsize=_MAX_KEPT_HEADERS)
def _read_gguf(file: Path, version: tuple[int, int] | None) -> tuple[int, dict[str, TensorEntry]]:
    """Cached, because a start reads the same header several times, and a header with a vocabulary
    takes a while."""
    header = read_header(file)
    entries = {}
    place = Path(os.path.realpath(file))  # messages name this file, not the link to it
    for tensor in header.tensors:
        name = hugging_face_name(tensor.name)
        shape = matrix_shape(name, tensor.shape)
        entries[name] = TensorEntry(place, tensor.type.name, shape, tensor.begin, tensor.end)
    return header.size, entries


def _parse_header(file: Path, header: bytes) -> dict[str, _Tensor]:
    try:
        table = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        table.pop("__metadata__", None)
        return {name: _decode_tensor(raw) for name, raw in table.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelLoadError(f"{file}: the safetensors header is malformed ({error})") from error


def model_fingerprint(folder: Path) -> str:
    """32 hex digits that identify the checkpoint in `folder`: its configuration and weights.

    Digests config.json and, for each weight file, its name, size, header, and samples at the
    start, middle and end of every tensor. This takes milliseconds; a digest of all weights takes
    minutes. The fingerprint detects wrong checkpoints and versions; it does not detect forgery.
    """
    digest = hashlib.blake2b(digest_size=16)
    _update(digest, read_small(folder / "config.json"))
    for file, entries in _entries_by_file(folder).items():
        header, file_size = _read_header(file)
        _update(digest, file.name.encode())
        _update(digest, str(file_size).encode())
        _update(digest, header)
        with open_regular(file) as stream:
            for name, tensor in sorted(entries.items()):
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


def _read_header(file: Path) -> tuple[bytes, int]:
    """The header and the file's size in bytes."""
    gguf_size = _gguf_header(file)[0] if file.suffix == SUFFIX else None
    with open_regular(file) as stream:
        try:
            file_size = os.fstat(stream.fileno()).st_size
            if gguf_size is not None:
                return stream.read(gguf_size), file_size
            size = int.from_bytes(stream.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ModelLoadError(f"{file} is not a safetensors file, or has too large a header")
            header = stream.read(size)
        except OSError as error:
            raise ModelLoadError(f"cannot read {file}: {error.strerror}") from error
    if not header or len(header) != size:
        raise ModelLoadError(f"{file} is not a safetensors file, or is truncated")
    return header, file_size
