"""Finished results, in a file, so that a search that was stopped continues there.

One JSON object a line. A line that was cut off by the end of a process is skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from protocol.errors import ConfigError

ResultT = TypeVar("ResultT")
_BEGIN = '{"key":'


class Ledger(Generic[ResultT]):
    """The results of one kind by their key, which says everything that a result depends on; without
    a path they are kept in memory alone. Raises ConfigError if the file cannot be read or holds
    something else."""

    def __init__(self, path: Path | None, kind: type[ResultT]) -> None:
        self._path = path
        self._kind = kind
        self._results: dict[str, ResultT] = {}
        self._is_cut_off = False
        if path is None or not path.exists():
            return
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--resume {path}: {error}") from error
        self._is_cut_off = bool(text) and not text.endswith("\n")
        lines = text.splitlines()
        found = [self._read(line) for line in lines]
        is_begun = self._is_cut_off and len(lines) == 1 and lines[0].startswith(_BEGIN)
        if lines and not any(found) and not is_begun:
            raise ConfigError(f"--resume {path}: the file holds something else; name another one")

    def __len__(self) -> int:
        return len(self._results)

    def find(self, key: str) -> ResultT | None:
        """The result with this key, if it is done."""
        return self._results.get(key)

    def add(self, key: str, result: ResultT) -> None:
        """Remember a result. Raises ConfigError if the file cannot be written."""
        self._results[key] = result
        if self._path is None:
            return
        line = msgspec.json.encode({"key": key, **msgspec.to_builtins(result)}).decode()
        try:
            with self._path.open("a", encoding="utf-8") as file:
                if self._is_cut_off:
                    file.write("\n")
                    self._is_cut_off = False
                file.write(line + "\n")
        except OSError as error:
            raise ConfigError(f"--resume {self._path}: {error.strerror}") from error

    def _read(self, line: str) -> bool:
        """Take a line's result; returns whether it holds one."""
        try:
            values = msgspec.json.decode(line, type=dict)
            key = msgspec.convert(values.pop("key", None), str)
            self._results[key] = msgspec.convert(values, self._kind)
        except msgspec.DecodeError:
            return False
        return True
