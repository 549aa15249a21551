"""A file of encrypted units of KV blocks, in slots of equal size.

The head of the file has its salt and the id of its key. The head of each slot has the name of its
unit, the time of writing and the nonce. A slot that is half written, was changed, or belongs to
another unit cannot be decrypted. The file grows as slots are used. One thread calls `read`, `write`
and `erase`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.tiers.disk_key import (
    ID_BYTES,
    NONCE_BYTES,
    SALT_BYTES,
    TAG_BYTES,
    DiskKey,
    DiskScope,
    ForgedBlock,
)
from kv_transfer.tiers.units import SUFFIX_BYTES
from protocol.errors import ConfigError
from protocol.hashing import HASH_BYTES

PAGE = 4096
_MAGIC = b"BATONKV3"
_FILE_HEAD = struct.Struct(f"<8s{SALT_BYTES}s{ID_BYTES}sQ")
_NAME_BYTES = HASH_BYTES + SUFFIX_BYTES
_SLOT_HEAD = struct.Struct(f"<{_NAME_BYTES}sQ{NONCE_BYTES}s")
_ABOUT = struct.Struct(f"<{_NAME_BYTES}sQ")


@dataclass(frozen=True)
class Found:
    """A unit that an earlier process wrote, as its slot's head describes it; the head may be
    false."""

    slot: int
    name: bytes
    written_s: int


class BlockFile:
    """Owner of an open file. `wall_s` is the time of the day in seconds. Raises ConfigError if the
    file cannot be used, for example on a full disk."""

    def __init__(
        self, fd: int, scope: DiskScope, unit_bytes: int, max_bytes: int,
        wall_s: Callable[[], float],
    ) -> None:  # fmt: skip
        self._fd = fd
        self._wall_s = wall_s
        self._slot_bytes = -(-(_SLOT_HEAD.size + unit_bytes + TAG_BYTES) // PAGE) * PAGE
        self._sealed_bytes = unit_bytes + TAG_BYTES
        self.num_slots = max(0, (max_bytes - PAGE) // self._slot_bytes)
        try:
            self._key, self.is_foreign = self._open_key(scope)
        except OSError as error:
            self.close()
            raise ConfigError(f"disk_tier_dir: a worker's file cannot be used: {error}") from error
        self._buffer = memoryview(bytearray(_SLOT_HEAD.size + self._sealed_bytes))

    def found(self) -> list[Found]:
        """The units that are there; one for each name."""
        units: dict[bytes, Found] = {}
        for slot in range(self.num_slots):
            head = os.pread(self._fd, _SLOT_HEAD.size, self._offset(slot))
            if len(head) < _SLOT_HEAD.size:
                break
            padded, written_s, _ = _SLOT_HEAD.unpack(head)
            if any(padded):
                name = _without_padding(padded)
                units.setdefault(name, Found(slot, name, written_s))
        return list(units.values())

    def write(self, slot: int, name: bytes, unit: memoryview) -> None:
        """Write a unit. Raises OSError; the slot then holds nothing that can be read."""
        written_s = int(self._wall_s())
        sealed = self._buffer[_SLOT_HEAD.size :]
        nonce = self._key.seal(unit, _ABOUT.pack(name, written_s), sealed)
        _SLOT_HEAD.pack_into(self._buffer, 0, name, written_s, nonce)
        self._write(self._offset(slot), self._buffer)

    def read(self, slot: int, name: bytes, into: memoryview) -> None:
        """Read the unit of this name. Raises OSError and ForgedBlock."""
        number = os.preadv(self._fd, [self._buffer], self._offset(slot))
        found, written_s, nonce = _SLOT_HEAD.unpack_from(self._buffer)
        if number < len(self._buffer) or _without_padding(found) != name:
            raise ForgedBlock("the slot does not hold this block")
        sealed = self._buffer[_SLOT_HEAD.size :]
        self._key.open(nonce, sealed, _ABOUT.pack(name, written_s), into)

    def erase(self, slot: int) -> None:
        """Overwrite the head of a slot: without its nonce, the unit cannot be decrypted. Raises
        OSError."""
        self._write(self._offset(slot), memoryview(bytes(_SLOT_HEAD.size)))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open_key(self, scope: DiskScope) -> tuple[DiskKey, bool]:
        """The file's key, and whether the file had another one: then it is emptied."""
        head = os.pread(self._fd, _FILE_HEAD.size, 0)
        if len(head) == _FILE_HEAD.size:
            magic, salt, key_id, slot_bytes = _FILE_HEAD.unpack(head)
            key = scope.key(salt)
            if magic == _MAGIC and key.has_id(key_id) and slot_bytes == self._slot_bytes:
                limit = self._offset(self.num_slots)
                if os.fstat(self._fd).st_size > limit:
                    os.ftruncate(self._fd, limit)
                return key, False
        os.ftruncate(self._fd, 0)
        salt = os.urandom(SALT_BYTES)
        key = scope.key(salt)
        packed = _FILE_HEAD.pack(_MAGIC, salt, key.key_id, self._slot_bytes)
        self._write(0, memoryview(packed.ljust(PAGE, b"\0")))
        return key, bool(head)

    def _offset(self, slot: int) -> int:
        return PAGE + slot * self._slot_bytes

    def _write(self, offset: int, data: memoryview) -> None:
        while data:
            number = os.pwrite(self._fd, data, offset)
            data, offset = data[number:], offset + number


def _without_padding(name: bytes) -> bytes:
    """The name in a slot's head; the name of a block's first unit is the block's hash alone."""
    return name if any(name[HASH_BYTES:]) else name[:HASH_BYTES]


def is_of(fd: int, scope: DiskScope) -> bool:
    """Whether the file's key is that of `scope`."""
    head = os.pread(fd, _FILE_HEAD.size, 0)
    if len(head) < _FILE_HEAD.size:
        return False
    _, salt, key_id, _ = _FILE_HEAD.unpack(head)
    return scope.key(salt).has_id(key_id)
