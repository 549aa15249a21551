"""Temporary files. A read-only container or a full disk has no room for them: a ConfigError."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

from protocol.errors import ConfigError

_NONE = (
    "no folder for temporary files can be written to, or all are full: mount one at /tmp, or name "
    "one by TMPDIR"
)


def temporary_folder(prefix: str) -> Path:
    """A new folder. Raises ConfigError."""
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise ConfigError(f"{_NONE} ({error.strerror})") from error


def temporary_file() -> IO[bytes]:
    """A new file without a name; the caller closes it. Raises ConfigError."""
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise ConfigError(f"{_NONE} ({error.strerror})") from error
