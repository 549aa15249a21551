"""The folders in which workers of one host keep their files of KV blocks.

In a common folder each worker has one of its own, `worker-0`, `worker-1`, ..., which nobody else
may enter, and which it locks while it lives. A worker that starts takes a free one, if possible one
whose file it can read, so that it finds its blocks again after a restart.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from kv_transfer.tiers.block_file import is_of
from kv_transfer.tiers.disk_key import DiskScope
from protocol.errors import ConfigError

FILE_NAME = "kv-blocks"
MAX_WORKERS = 64


def claim_file(common: Path, scope: DiskScope) -> int:
    """Open and lock the file of a free folder, and return its descriptor. The lock ends with it.
    Raises ConfigError."""
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
    """Lock the free files one after the other, in `free`, and take the chosen one out of it."""
    for number in range(MAX_WORKERS):
        folder = common / f"worker-{number}"
        is_new = not folder.exists()
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
    raise ConfigError(f"disk_tier_dir {common}: {MAX_WORKERS} workers use it already")


def _try_lock(folder: Path) -> int | None:
    """The file of a worker's folder; None if another worker has it. Raises OSError, and ConfigError
    for a folder of another user."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"{folder} is not a folder of the user that this worker runs as")
    folder.chmod(0o700)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(folder / FILE_NAME, flags, 0o600)
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
