"""Cells that are done, in a file of JSON lines. A line that was cut off is skipped."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.policies.cells import Cell, Score
from protocol.errors import BatonError


class _Line(msgspec.Struct, frozen=True):
    cell: Cell
    score: Score
    version: str


class Ledger:
    """The scores by cell. `version` says which policies and settings were simulated: lines of
    others do not count."""

    def __init__(self, path: Path | None, version: str) -> None:
        self._path = path
        self._version = version
        self._scores: dict[Cell, Score] = {}
        if path is not None and path.exists():
            for raw in path.read_bytes().splitlines():
                self._read(raw)

    def _read(self, raw: bytes) -> None:
        try:
            line = msgspec.json.decode(raw, type=_Line)
        except msgspec.DecodeError:
            return
        if line.version == self._version:
            self._scores[line.cell] = line.score

    def find(self, cell: Cell) -> Score | None:
        """The score of a cell, if it is done."""
        return self._scores.get(cell)

    def add(self, cell: Cell, score: Score) -> None:
        """Keep a score. Raises BatonError if it cannot be written."""
        self._scores[cell] = score
        if self._path is None:
            return
        try:
            with self._path.open("ab") as file:
                file.write(b"\n" + msgspec.json.encode(_Line(cell, score, self._version)) + b"\n")
        except OSError as error:
            raise BatonError(f"--resume {self._path}: {error.strerror}") from error
