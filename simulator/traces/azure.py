"""Azure's traces of 2023: a CSV table of times, prompt and output tokens; no prompts repeat."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from protocol.errors import ConfigError
from simulator.traces.lines import MAX_TOKENS
from simulator.traces.sessions import Session, Turn

COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def sessions(path: Path) -> Iterator[Session]:
    """One session for each row. Raises ConfigError, naming the line."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        next(rows, None)
        first: float | None = None
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if not row:
                continue
            if len(row) != len(COLUMNS):
                raise ConfigError(f"{where}: there must be {len(COLUMNS)} columns, not {len(row)}")
            at = _seconds(row[0], where)
            first = at if first is None else first
            prompt, output = _count(row[1], COLUMNS[1], where), _count(row[2], COLUMNS[2], where)
            yield Session(f"a{rows.line_num}", max(0.0, at - first), (Turn(0.0, prompt, output),))


def _seconds(cell: str, where: str) -> float:
    """The time of a cell; Azure writes seven digits of a second, where Python reads six."""
    whole, _, fraction = cell.partition(".")
    try:
        return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
    except ValueError:
        raise ConfigError(f"{where}: {COLUMNS[0]} must be a time, not {cell[:40]!r}") from None


def _count(cell: str, name: str, where: str) -> int:
    if not cell.isdecimal() or not 1 <= int(cell) <= MAX_TOKENS:
        raise ConfigError(f"{where}: {name} must be a positive whole number, not {cell[:40]!r}")
    return int(cell)
