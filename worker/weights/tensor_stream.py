"""The stream of bytes that carries a checkpoint's tensors, on the sender's side."""

from __future__ import annotations

import hashlib
from typing import BinaryIO

from checkpoint.regular_file import open_regular
from engine.checkpoint.files import TensorEntry
from protocol.errors import ModelLoadError
from protocol.weight_messages import StoredTensor

DIGEST_BYTES = 32


class TensorStream:
    """The bytes of stored tensors one after the other, each followed by its SHA-256."""

    def __init__(self, tensors: dict[str, TensorEntry]) -> None:
        self.tensors = [
            StoredTensor(name=name, dtype=e.dtype, shape=e.shape, num_bytes=e.num_bytes)
            for name, e in tensors.items()
        ]
        self.num_bytes = sum(each.num_bytes + DIGEST_BYTES for each in self.tensors)
        self._entries = iter(tensors.values())
        self._file: BinaryIO | None = None
        self._entry: TensorEntry | None = None
        self._left = 0
        self._digest = hashlib.sha256()
        self._tail = b""

    def read_into(self, place: memoryview) -> int:
        """Fill `place` with the next bytes; returns their number, which is less than its size only
        at the end. Raises ModelLoadError if a file has become shorter."""
        filled = 0
        while filled < len(place):
            if self._left:
                filled += self._read(place[filled : filled + self._left])
            elif self._tail:
                part = self._tail[: len(place) - filled]
                place[filled : filled + len(part)] = part
                filled, self._tail = filled + len(part), self._tail[len(part) :]
            elif not self._begin_next():
                break
        return filled

    def _read(self, place: memoryview) -> int:
        assert self._file is not None
        assert self._entry is not None
        size = self._file.readinto(place)  # type: ignore[attr-defined]
        if not size:
            raise ModelLoadError(f"{self._entry.file} has become shorter")
        self._digest.update(place[:size])
        self._left -= size
        if not self._left:
            self._tail = self._digest.digest()
        return int(size)

    def _begin_next(self) -> bool:
        """Begin with the next tensor, if there is one."""
        former, self._entry = self._entry, next(self._entries, None)
        if self._entry is None or former is None or former.file != self._entry.file:
            self.close()
        if self._entry is None:
            return False
        if self._file is None:
            self._file = open_regular(self._entry.file)
        self._file.seek(self._entry.begin)
        self._left, self._digest = self._entry.num_bytes, hashlib.sha256()
        if not self._left:
            self._tail = self._digest.digest()
        return True

    def close(self) -> None:
        """Close the file that is being read."""
        if self._file is not None:
            self._file.close()
            self._file = None
