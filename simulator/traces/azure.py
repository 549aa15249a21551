"""Azure's traces of 2023 and 2024, and BurstGPT: CSV tables of times, prompt and output tokens.

Columns may come in any order and with others between them. Azure's times without a zone are UTC.
BurstGPT's are whole seconds, so each request is put at a random time within its second.
"""

from __future__ import annotations

import csv
import io
import random
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from protocol.errors import ConfigError
from simulator.traces.lines import MAX_TOKENS, open_trace
from simulator.traces.sessions import Session, Turn

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
_TIME = re.compile(
    r"(?P<whole>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.(?P<fraction>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d\d(:?\d\d)?)?",
    re.ASCII,
)
_COUNT = re.compile(r"\d{1,12}", re.ASCII)
_WHOLE = re.compile(r"(\d{1,12})(\.0*)?", re.ASCII)


def is_header(line: str) -> bool:
    """Whether a file's first line names the columns."""
    try:
        return _columns(_names(next(csv.reader([line]), []))) is not None
    except csv.Error:
        return False


def sessions(path: Path, rng: random.Random) -> Iterator[Session]:
    """One session for each row, in order of their times. Raises ConfigError, naming the line."""
    found = sorted(_requests(path, rng), key=lambda each: each[0])
    for at, number, turn in found:
        yield Session(f"a{number}", at - found[0][0], (turn,))


def _columns(header: list[str]) -> tuple[str, str, str] | None:
    """The columns of time, prompt and output of a table with this header."""
    return next((each for each in (COLUMNS, BURST_COLUMNS) if set(each) <= set(header)), None)


def _requests(path: Path, rng: random.Random) -> Iterator[tuple[float, int, Turn]]:
    """Each row's time in seconds, line and request."""
    with io.TextIOWrapper(open_trace(path), encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        try:
            header = _names(next(filter(None, rows)))
            columns = _columns(header) or COLUMNS
            places = [header.index(each) for each in columns]
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                if not row:
                    continue
                if len(row) != len(header):
                    expected = f"there must be {len(header)} columns, not {len(row)}"
                    raise ConfigError(f"{where}: {expected}")
                time, prompt, output = (row[place].strip() for place in places)
                at_s = _seconds(time, where) if columns is COLUMNS else _within(time, where, rng)
                num_prompt = _count(prompt, columns[1], where, 1)
                num_output = max(1, _count(output, columns[2], where, 0))
                yield at_s, rows.line_num, Turn(0.0, num_prompt, num_output)
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


def _within(cell: str, where: str, rng: random.Random) -> float:
    """A time within the second of a cell."""
    parts = _WHOLE.fullmatch(cell)
    if parts is None:
        name = BURST_COLUMNS[0]
        raise ConfigError(f"{where}: {name} must be a whole number of seconds, not {cell[:40]!r}")
    return int(parts[1]) + rng.random()


def _count(cell: str, name: str, where: str, minimum: int) -> int:
    if not _COUNT.fullmatch(cell) or not minimum <= int(cell) <= MAX_TOKENS:
        raise ConfigError(
            f"{where}: {name} must be a whole number from {minimum} to {MAX_TOKENS:,}, "
            f"not {cell[:40]!r}"
        )
    return int(cell)
