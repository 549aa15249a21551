"""Temporary files. A read-only container may have no folder for them, which is a ConfigError."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

from protocol.errors import ConfigError

_NONE = "there is no writable folder for temporary files: mount one at /tmp, or name one by TMPDIR"


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
