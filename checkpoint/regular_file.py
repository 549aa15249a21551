"""Opens files of an untrusted checkpoint, which may be a pipe, a device, a link, or too large.

Nothing here waits for another process or reads more than its limit. Small files are texts that may
reach clients, so a link may not lead out of the checkpoint's folder; the hub's cache is the one
exception, since it links every file to its own folder of blobs. Weights may be links to anywhere.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from protocol.errors import ModelLoadError

MAX_SMALL_BYTES = 16 * 1024 * 1024
"""More than any small file except an index has, even a vocabulary of 250,000 added tokens."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
_LFS = b"version https://git-lfs"


def open_regular(path: Path) -> BinaryIO:
    """The file for reading. Raises ModelLoadError if it is missing, no regular file, or the pointer
    that Git leaves in a file's place if Git LFS is not installed."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing") from error
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "of an unknown kind")
        flaw = f"{path} is {kind}, not a regular file"
    elif _starts_with(handle, _LFS):
        flaw = f"{path} is a pointer of Git LFS: fetch the file itself, as by `git lfs pull`"
    else:
        return open(handle, "rb")
    os.close(handle)
    raise ModelLoadError(flaw)


def _starts_with(handle: int, start: bytes) -> bool:
    try:
        return os.pread(handle, len(start), 0) == start
    except OSError:  # the reader sees it, too
        return False


def read_small(path: Path, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """The whole file. Raises ModelLoadError if it cannot be read or is longer than `max_bytes`."""
    _check_link(path)
    with open_regular(path) as file:
        try:
            is_too_long = os.fstat(file.fileno()).st_size > max_bytes
            content = b"" if is_too_long else file.read(max_bytes + 1)
        except OSError as error:
            raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    if is_too_long or len(content) > max_bytes:
        raise ModelLoadError(f"{path} is longer than {max_bytes} bytes, the limit for such a file")
    return content


def read_text(path: Path, max_bytes: int = MAX_SMALL_BYTES) -> str:
    """The whole file's text. Raises ModelLoadError as `read_small`, and if it is not UTF-8."""
    try:
        return read_small(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} is not valid UTF-8: {error.reason}") from error


def is_there(path: Path) -> bool:
    """Whether an optional file exists. A link to nowhere counts, and raises an error when it is
    read."""
    return os.path.lexists(path)


def _check_link(path: Path) -> None:
    if not path.is_symlink():
        return
    folder, target = path.parent.resolve(), Path(os.path.realpath(path))
    is_in_hub_cache = folder.parent.name == "snapshots"
    if target.is_relative_to(folder):
        return
    if is_in_hub_cache and target.is_relative_to(folder.parent.parent / "blobs"):
        return
    raise ModelLoadError(
        f"{path} is a link out of its folder, to {target}; put a copy of that file in its place"
    )
