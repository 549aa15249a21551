"""Shared memory files and the private folder that they live in.

A segment is a mapped file on the host's memory file system (`/dev/shm` if there is one), in a
folder that only this user may enter. Its creator holds a lock on `<name>.lock`, which the kernel
drops however the creator ends. Files whose lock is free belong to a dead process and are removed
when the next process opens the folder. Creating and sweeping exclude each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import ConfigError, TransferError

_MEMORY_FILE_SYSTEM = Path("/dev/shm")
_SUFFIXES = (".pool", ".sock", ".lock")  # the lock is removed last


def default_folder() -> Path:
    """Where segments live: `/dev/shm` if this user can write there, else the temp folder."""
    writable = os.access(_MEMORY_FILE_SYSTEM, os.W_OK | os.X_OK)
    parent = _MEMORY_FILE_SYSTEM if writable else Path(tempfile.gettempdir())
    return parent / f"baton-{os.getuid()}"


class SegmentFolder:
    """One process's claim to a name in the folder; `close` removes all files of this name."""

    def __init__(self, folder: Path, name: str) -> None:
        """Open and sweep the folder, claim `name`. Raises ConfigError if the folder is not ours."""
        self._folder = folder
        self._name = name
        with _exclusively(folder):
            _sweep(folder)
            self._lock: int | None = os.open(
                folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def pool_path(self) -> Path:
        """The file that holds the pool."""
        return self._folder / f"{self._name}.pool"

    @property
    def socket_path(self) -> Path:
        """The socket that receives notifications."""
        return self._folder / f"{self._name}.sock"

    def create_pool(self, num_bytes: int) -> mmap.mmap:
        """Reserve and map `num_bytes` of zeroes. Raises ConfigError if memory does not suffice."""
        file = os.open(self.pool_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(file, num_bytes)
            return mmap.mmap(file, num_bytes)
        except OSError as error:
            self.pool_path.unlink()
            raise ConfigError(
                f"cannot reserve {num_bytes} bytes of shared memory in {self._folder}: "
                f"{error.strerror}; use fewer KV blocks, enlarge it (containers: --shm-size), "
                "or use the transport nixl"
            ) from error
        finally:
            os.close(file)

    def close(self) -> None:
        """Remove the files and the claim. Mappings live until their holders drop them."""
        if self._lock is None:
            return
        with _exclusively(self._folder):
            _remove(self._folder, self._name)
            os.close(self._lock)
            self._lock = None
            with contextlib.suppress(OSError):  # other processes still use it
                self._folder.rmdir()


def map_pool(path: Path, num_bytes: int) -> mmap.mmap:
    """Map a peer's pool. Raises TransferError unless it is our user's and large enough."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise TransferError(
            f"a peer's pool {path} cannot be opened ({error.strerror}); "
            "both workers must run on one host, as one user"
        ) from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise TransferError(f"a peer's pool {path} is not a file of this user")
        if status.st_size < num_bytes:
            raise TransferError(
                f"a peer's pool {path} has {status.st_size} bytes, expected {num_bytes}"
            )
        return mmap.mmap(file, num_bytes)
    except OSError as error:
        raise TransferError(f"a peer's pool {path} cannot be mapped: {error}") from error
    finally:
        os.close(file)


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise ConfigError(f"{folder} must be a folder of this user; remove it")
        folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used for shared memory: {error}") from error


@contextlib.contextmanager
def _exclusively(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the folder exists while the lock is held."""
    file = _try_lock(folder)
    while file is None:
        file = _try_lock(folder)
    try:
        yield
    finally:
        os.close(file)


def _try_lock(folder: Path) -> int | None:
    """Make, open and lock the folder; None if the previous lock holder has removed it."""
    _make_private(folder)
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(file, fcntl.LOCK_EX)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file), folder.lstat()):
            return file
    os.close(file)
    return None


def _sweep(folder: Path) -> None:
    """Remove the files of names whose lock is free."""
    for path in folder.glob("*.lock"):
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            _remove(folder, path.stem)
        finally:
            os.close(lock)


def _remove(folder: Path, name: str) -> None:
    for suffix in _SUFFIXES:
        (folder / f"{name}{suffix}").unlink(missing_ok=True)


def _reserve(file: int, num_bytes: int) -> None:
    """Allocate the memory now: with a sparse file, a full host means SIGBUS on first touch."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    else:
        os.ftruncate(file, num_bytes)
