"""Files that a command writes at its end: checked before its work, written as a whole or not at
all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from process.settings.home_paths import home_path
from protocol.errors import ConfigError


class OutputFile:
    """The file at `name`, which the flag `flag` named. All methods raise ConfigError."""

    def __init__(self, flag: str, name: str) -> None:
        self._flag = flag
        self._name = name

    def check(self) -> None:
        """Raises if nothing can be written there. A file that is there stays as it is."""
        with self._path() as path:
            is_new = not path.exists()
            path.open("a").close()
            if is_new:
                path.unlink()

    def write(self, text: str) -> None:
        """Write the content, as a whole or not at all."""
        with self._path() as path:
            if path.exists() and not path.is_file():  # a pipe or a device
                path.write_text(text, encoding="utf-8")
                return
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                partial.write_text(text, encoding="utf-8")
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

    @contextmanager
    def _path(self) -> Iterator[Path]:
        try:
            yield home_path(self._name, self._flag)
        except OSError as error:
            raise ConfigError(f"{self._flag} {self._name}: {error.strerror}") from error
