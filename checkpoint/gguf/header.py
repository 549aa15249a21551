"""Reads the header of a GGUF file: metadata and the list of tensors; reads no weight.

The file is untrusted: every count and offset is checked against the file's size before memory is
allocated, so time and memory are bounded by the header's bytes. Every error is one ModelLoadError
that names the file. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from checkpoint.regular_file import open_regular
from protocol.errors import ModelLoadError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 << 20
"""Several times what a header with a vocabulary of 250,000 tokens needs."""
MAX_ELEMENTS = 1 << 22
"""Limit on the items of all arrays together."""
MAX_TENSORS = 1 << 17
MAX_KEYS = 1 << 12
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""struct's codes of the types of metadata."""


@dataclass(frozen=True)
class BlockType:
    """How numbers are stored: `num_bytes` for each `size` neighbours of a row."""

    name: str
    size: int
    num_bytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
"""The supported types, by their numbers in the format."""
PLAIN_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: `shape` with the longest stride first, as in torch; `begin` and `end` are byte
    offsets into `file`."""

    file: Path
    name: str
    type: BlockType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class GgufHeader:
    """A file's metadata and tensors; `size` is the header's length in bytes."""

    metadata: dict[str, Any]
    tensors: list[GgufTensor]
    size: int


def read_header(file: Path) -> GgufHeader:
    """The header of the GGUF file `file`. Raises ModelLoadError."""
    with open_regular(file) as stream:
        try:
            return _Reader(file, stream).header()
        except OSError as error:
            raise ModelLoadError(f"cannot read {file}: {error.strerror}") from error


class _Reader:
    """Reads values in order, none beyond the file or the limit on headers."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file = file
        self._stream = stream
        self._file_size = os.fstat(stream.fileno()).st_size
        self._left = min(self._file_size, MAX_HEADER_BYTES)
        self._elements_left = MAX_ELEMENTS

    def header(self) -> GgufHeader:
        self._check_start()
        num_tensors = self._count("tensors", MAX_TENSORS, least_bytes=24)
        num_keys = self._count("metadata keys", MAX_KEYS, least_bytes=13)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._wrong(f"the metadata key {key!r} is there twice")
            metadata[key] = self._value(key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        size = self._stream.tell()
        return GgufHeader(metadata, self._placed(infos, size, self._alignment(metadata)), size)

    def _check_start(self) -> None:
        start = self._stream.read(8)
        self._left -= len(start)
        if start[:4] != MAGIC:
            raise ModelLoadError(f"{self._file} is not a GGUF file")
        version = int.from_bytes(start[4:], "little")
        if len(start) < 8:
            raise self._cut_short("its version")
        if version not in SUPPORTED_VERSIONS:
            is_swapped = int.from_bytes(start[4:], "big") in SUPPORTED_VERSIONS
            found = "is big-endian" if is_swapped else f"has version {version}"
            raise self._wrong(f"the file {found}; supported are little-endian versions 2 and 3")

    def _value(self, key: str) -> Any:
        kind = self._number("I", f"the type of {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        return self._number(self._code(kind, key), f"the value of {key!r}")

    def _array(self, key: str) -> list[Any]:
        kind = self._number("I", f"the type of {key!r}")
        if kind == _ARRAY:
            raise self._wrong(f"the value of {key!r} is an array of arrays, which is not supported")
        what = f"elements of {key!r}"
        code = "Q" if kind == _STRING else self._code(kind, key)  # a string begins with its length
        size = struct.calcsize(code)
        count = self._count(what, self._elements_left, least_bytes=size)
        self._elements_left -= count
        if kind == _STRING:
            return [self._string(f"the value of {key!r}") for _ in range(count)]
        return list(struct.unpack(f"<{count}{code}", self._bytes(count * size, what)))

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise self._wrong(f"the value of {key!r} has the type {kind}, which is unknown")
        return _SCALARS[kind]

    def _string(self, what: str) -> str:
        content = self._bytes(self._number("Q", what), what)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self._wrong(f"{what} is not valid UTF-8: {error.reason}") from error

    def _number(self, code: str, what: str) -> Any:
        (value,) = struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code), what))
        return value

    def _count(self, what: str, most: int, least_bytes: int) -> int:
        count: int = self._number("Q", f"the number of {what}")
        if count > most or count * least_bytes > self._left:
            raise self._wrong(f"the number of {what}, {count}, is more than the file can hold")
        return count

    def _bytes(self, count: int, what: str) -> bytes:
        if count > self._left:
            if self._file_size > MAX_HEADER_BYTES:
                raise self._wrong(f"the header is longer than {MAX_HEADER_BYTES} bytes, at {what}")
            raise self._cut_short(what)
        content = self._stream.read(count)
        if len(content) < count:
            raise self._cut_short(what)
        self._left -= count
        return content

    def _tensor_info(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        name = self._string("a tensor's name")
        what = f"tensor {name!r}"
        num_dimensions = self._number("I", what)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._wrong(f"{what} has {num_dimensions} dimensions; supported are 1 to 4")
        sizes = [self._number("Q", what) for _ in range(num_dimensions)]
        if not all(1 <= size < 1 << 40 for size in sizes):
            raise self._wrong(f"{what} has the impossible shape {sizes[::-1]}")
        number = self._number("I", what)
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            raise self._wrong(
                f"{what} is stored as {_type_name(number)}; "
                f"supported are {', '.join(each.name for each in BLOCK_TYPES.values())}"
            )
        if sizes[0] % kind.size:
            raise self._wrong(
                f"{what} has rows of {sizes[0]} numbers, no whole blocks of {kind.name} "
                f"({kind.size})"
            )
        return name, kind, tuple(sizes[::-1]), self._number("Q", what)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_good = isinstance(alignment, int) and 1 <= alignment <= _MAX_ALIGNMENT
        if not is_good or alignment & (alignment - 1):
            raise self._wrong(f"'general.alignment' must be a power of two, not {alignment!r}")
        return int(alignment)

    def _placed(
        self,
        infos: list[tuple[str, BlockType, tuple[int, ...], int]],
        header_size: int,
        alignment: int,
    ) -> list[GgufTensor]:
        """The tensors in the order of their places, checked to lie within the file without
        overlap."""
        start = -(-header_size // alignment) * alignment
        tensors: list[GgufTensor] = []
        names: set[str] = set()
        for name, kind, shape, offset in sorted(infos, key=lambda info: info[3]):
            if name in names:
                raise self._wrong(f"the tensor {name!r} is there twice")
            names.add(name)
            begin = start + offset
            end = begin + math.prod(shape) // kind.size * kind.num_bytes
            if end > self._file_size:
                raise self._wrong(
                    f"tensor {name!r} lies outside the file ({self._file_size} bytes); "
                    "the file is cut short or corrupt"
                )
            if offset % alignment:
                raise self._wrong(f"tensor {name!r} does not begin at a multiple of {alignment}")
            if tensors and begin < tensors[-1].end:
                raise self._wrong(f"tensors {tensors[-1].name!r} and {name!r} share bytes")
            tensors.append(GgufTensor(self._file, name, kind, shape, begin, end))
        return tensors

    def _cut_short(self, what: str) -> ModelLoadError:
        return self._wrong(f"the file is cut short in {what}, at {self._file_size} bytes")

    def _wrong(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file}: {reason}")


def _type_name(number: int) -> str:
    from gguf import GGMLQuantizationType  # slow to import, rarely needed

    try:
        return str(GGMLQuantizationType(number).name)
    except ValueError:
        return f"the unknown type {number}"
