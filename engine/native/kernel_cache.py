"""The folder of built kernels, which nobody else may change: a library in it is code that runs with
the user's rights. So a folder is used only if this user or root owns it and every folder above it,
and nobody else may write to any of them. A folder with the sticky bit, such as /tmp, also counts,
because others cannot replace files of this user there. If the cache is not such a folder, the
kernels go into a temporary folder of this user. If another user has taken the name of that folder,
they go into a folder that is deleted with the process. If others could rename even this folder, no
kernels are built.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """The cache below XDG_CACHE_HOME or ~/.cache if it exists or can be made and belongs to this
    user alone; otherwise such a folder among the temporary files. Raises OSError if there is none.
    """
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without an entry in the system's list, and without HOME
        return _other_folder("this user has no home folder")
    folder = Path(root) / "baton" / "kernels"
    reason = why_not(folder) or _why_not_made(folder)
    return folder if not reason else _other_folder(f"{folder}: {reason}")


def _why_not_made(folder: Path) -> str:
    """Why a folder does not exist and cannot be made; "" if it does or can."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if there == folder or os.access(there, os.W_OK | os.X_OK):
        return ""
    return f"{there} cannot be written to"


def why_not(path: Path) -> str:
    """Why others could change a file or folder, or one above it; "" if they cannot. Files that do
    not exist yet are ignored."""
    real = Path(os.path.realpath(path))
    for each in (real, *real.parents):
        try:
            status = each.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{each} cannot be looked at: {error.strerror}"
        if status.st_uid not in (0, os.geteuid()):
            return f"{each} belongs to another user"
        is_own_group = status.st_gid == os.getegid() == os.geteuid()  # a group of this user alone
        others_write = status.st_mode & (stat.S_IWOTH | (0 if is_own_group else stat.S_IWGRP))
        is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if others_write and not is_sticky:
            return f"others may write to {each}"
    return ""


@functools.cache
def _other_folder(reason: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"baton-kernels-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if squatted := why_not(folder):
        folder = Path(tempfile.mkdtemp(prefix="baton-kernels-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        reason += f"; {squatted}"
        if still := why_not(folder):  # as below the temporary folder of a Kubernetes pod
            raise PermissionError(
                f"{reason}; {still}. Build them ahead (baton build-kernels), or let XDG_CACHE_HOME "
                "name a folder that only this user may write to"
            )
    _log.warning("kernels are kept in %s: %s", folder, reason)
    return folder
