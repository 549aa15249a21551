"""A file that only its owner may read, and that never grows beyond a limit.

When the file is half as large as the limit, it is renamed to `NAME.1`, which replaces an earlier
`NAME.1`, and a new file begins. A write either happens as a whole or leaves nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from process.settings.home_paths import home_path
from protocol.errors import ConfigError

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class TraceFile:
    """Owns the open file, which no other process may write to. Not thread-safe."""

    def __init__(self, path: str | Path, max_bytes: int) -> None:
        """Opens or creates the file; a leading `~` is a home folder. Raises ConfigError."""
        self._path = path = home_path(path, "record_trace")
        self._limit = max_bytes // 2
        try:
            self._fd = _open(path)
        except BlockingIOError:
            raise ConfigError(
                f"record_trace {path}: another process records there; each router needs a file of "
                "its own"
            ) from None
        except OSError as error:
            raise ConfigError(f"record_trace {path}: {error.strerror}") from error
        self._size = os.fstat(self._fd).st_size

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more fit into this file; an empty one takes any number. A file that
        was moved or removed takes none, so that recording goes on in the one at its path."""
        is_there = self._is_at_path()
        return is_there and (not self._size or self._size + num_bytes <= self._limit)

    def rotate(self) -> None:
        """Begin a new file, or go on in the one that took this one's path. Raises OSError, and may
        then be called again."""
        if self._is_at_path():  # else it was moved, maybe by an earlier call that could not open
            os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
        former, self._fd = self._fd, _open(self._path)
        self._size = os.fstat(self._fd).st_size
        os.close(former)

    def write(self, data: bytes) -> None:
        """Append. Raises OSError, and then the file is as before."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += written

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(self._path.lstat(), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _open(path: Path) -> int:
    fd = os.open(path, _FLAGS, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fd, 0o600)
    except OSError:
        os.close(fd)
        raise
    return fd
