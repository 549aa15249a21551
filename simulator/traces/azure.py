"""Azure's traces of 2023 and 2024: CSV tables of times, prompt and output tokens; no prefixes.

Columns may come in any order and with others between them. Times without a zone are UTC.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from protocol.errors import ConfigError
from simulator.traces.lines import MAX_TOKENS, open_trace
from simulator.traces.sessions import Session, Turn

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(
    r"(?P<whole>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.(?P<fraction>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d\d(:?\d\d)?)?",
    re.ASCII,
)
_COUNT = re.compile(r"\d{1,12}", re.ASCII)


def is_header(line: str) -> bool:
    """Whether a file's first line names the columns."""
    try:
        return set(COLUMNS) <= set(_names(next(csv.reader([line]), [])))
    except csv.Error:
        return False


def sessions(path: Path) -> Iterator[Session]:
    """One session for each row, in order of their times. Raises ConfigError, naming the line."""
    found = sorted(_requests(path), key=lambda each: each[0])
    for at, number, turn in found:
        yield Session(f"a{number}", at - found[0][0], (turn,))


def _requests(path: Path) -> Iterator[tuple[float, int, Turn]]:
    """Each row's time in seconds, line and request."""
    with io.TextIOWrapper(open_trace(path), encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        try:
            header = _names(next(filter(None, rows)))
            places = [header.index(each) for each in COLUMNS]
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                if not row:
                    continue
                if len(row) != len(header):
                    expected = f"there must be {len(header)} columns, not {len(row)}"
                    raise ConfigError(f"{where}: {expected}")
                time, prompt, output = (row[place].strip() for place in places)
                num_prompt = _count(prompt, COLUMNS[1], where, 1)
                num_output = max(1, _count(output, COLUMNS[2], where, 0))
                yield _seconds(time, where), rows.line_num, Turn(0.0, num_prompt, num_output)
        except csv.Error as error:
            raise ConfigError(f"{path}, line {rows.line_num}: not valid CSV: {error}") from error


def _names(row: list[str]) -> list[str]:
    return [each.strip().removeprefix("\ufeff").strip(' "') for each in row]


def _seconds(cell: str, where: str) -> float:
    """The time of a cell; Azure writes seven digits of a second, where Python reads six."""
    parts = _TIME.fullmatch(cell)
    try:
        if parts is None:
            raise ValueError
        whole = datetime.fromisoformat(parts["whole"] + (parts["zone"] or ""))
        if whole.tzinfo is None:
            whole = whole.replace(tzinfo=UTC)
        return whole.timestamp() + float(f"0.{parts['fraction'] or 0}")
    except (ValueError, OverflowError):
        expected = "a time such as 2023-11-16 18:15:46.68"
        raise ConfigError(f"{where}: {COLUMNS[0]} must be {expected}, not {cell[:40]!r}") from None


def _count(cell: str, name: str, where: str, minimum: int) -> int:
    if not _COUNT.fullmatch(cell) or not minimum <= int(cell) <= MAX_TOKENS:
        raise ConfigError(
            f"{where}: {name} must be a whole number from {minimum} to {MAX_TOKENS:,}, "
            f"not {cell[:40]!r}"
        )
    return int(cell)
