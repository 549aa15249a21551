"""The folders in which workers of one host keep their files of KV blocks.

In a common folder each worker has a folder of its own, `worker-0`, `worker-1`, .... No other user
may enter it, and the worker locks it while it lives. A worker that starts takes a free folder, if
possible one whose file it can read, so that it finds its blocks again after a restart.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path

from kv_transfer.tiers.block_file import is_of
from kv_transfer.tiers.disk_key import DiskScope
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

FILE_NAME = "kv-blocks"
MAX_WORKERS = 64
_FILE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def claim_file(common: Path, scope: DiskScope) -> int:
    """Open and lock the file of a free folder, and return its descriptor. Closing the descriptor
    releases the lock. Raises ConfigError."""
    try:
        common.mkdir(mode=0o700, parents=True, exist_ok=True)
        free: list[int] = []
        try:
            return _choose(common, scope, free)
        finally:
            for fd in free:
                os.close(fd)
    except OSError as error:
        raise ConfigError(f"disk_tier_dir {common} cannot be used: {error}") from error


def _choose(common: Path, scope: DiskScope, free: list[int]) -> int:
    """Lock free files one after the other until one is chosen, and return the chosen one. `free`
    gets the other locked files, which the caller closes."""
    for number in range(MAX_WORKERS):
        folder = common / f"worker-{number}"
        is_new = not os.path.lexists(folder)
        if is_new and free:
            return free.pop(0)
        fd = _try_lock(folder)
        if fd is None:
            continue
        if is_new or is_of(fd, scope):
            return fd
        free.append(fd)
    if free:
        return free.pop(0)
    raise ConfigError(f"disk_tier_dir {common}: none of {MAX_WORKERS} folders for workers is free")


def _try_lock(folder: Path) -> int | None:
    """The file of a worker's folder; None if another worker has it, or if the folder is a link or
    another user's. Raises OSError."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    held = _try_open_folder(folder)
    if held is None:
        log.warning(
            "%s does not belong to the user that this worker runs as: it is left alone", folder
        )
        return None
    try:
        fd = os.open(FILE_NAME, _FILE_FLAGS, 0o600, dir_fd=held)
    finally:
        os.close(held)
    try:
        os.fchmod(fd, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


def _try_open_folder(folder: Path) -> int | None:
    """A descriptor of our own folder, which nobody else may enter from now on."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
            return None
        raise
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        return None
    os.fchmod(fd, 0o700)
    return fd
