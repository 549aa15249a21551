"""Trials that are done, in a file: a search that was stopped goes on where it was.

One JSON object a line. A line that was cut off by the end of a process is skipped.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from protocol.errors import ConfigError
from simulator.planning.race import Trial


class Ledger:
    """The trials by their key, which says everything that a trial depends on; without a path they
    are kept in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._trials: dict[str, Trial] = {}
        self._is_cut_off = False
        if path is None or not path.exists():
            return
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--resume {path}: {error}") from error
        self._is_cut_off = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            self._read(line)

    def __len__(self) -> int:
        return len(self._trials)

    def find(self, key: str) -> Trial | None:
        """The trial with this key, if it was done."""
        return self._trials.get(key)

    def add(self, key: str, trial: Trial) -> None:
        """Remember a trial. Raises ConfigError if the file cannot be written."""
        self._trials[key] = trial
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                if self._is_cut_off:
                    file.write("\n")
                    self._is_cut_off = False
                file.write(json.dumps({"key": key, **asdict(trial)}) + "\n")
        except OSError as error:
            raise ConfigError(f"--resume {self._path}: {error.strerror}") from error

    def _read(self, line: str) -> None:
        try:
            values = json.loads(line)
            key = values.pop("key")
            self._trials[key] = Trial(**values)
        except (ValueError, TypeError, KeyError, AttributeError):
            return
