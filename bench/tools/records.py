"""Records of measurements: tables with the date, commit and machine of their figures.

A record is a JSON file under docs/measured/, one for each machine. It keeps the newest table of
each name. `scripts/measured_tables.py` writes the tables into the documents.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from bench.tools.machine import processor_name

_ROOT = Path(__file__).parents[2]
_NOT_RECORDED = ("--record", "--peer-python")
"""Flags that say where things lie on one machine."""


@dataclass(frozen=True)
class MeasuredTable:
    """A table and where its figures come from. `recorded` and `commit` are empty if unknown."""

    recorded: str
    commit: str
    command: str
    columns: list[str]
    rows: list[list[str]]

    def column(self, name: str) -> dict[str, str]:
        """The cells below a heading, by the first cell of their rows."""
        index = self.columns.index(name)
        return {row[0]: row[index] for row in self.rows}


@dataclass(frozen=True)
class Record:
    """The newest tables of one machine, by name."""

    machine: str
    tables: dict[str, MeasuredTable]


def read_record(path: Path) -> Record:
    """The record in a file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    tables = {name: MeasuredTable(**table) for name, table in content["tables"].items()}
    return Record(content["machine"], tables)


def add_record_option(parser: argparse.ArgumentParser) -> None:
    """Add `--record FILE` to a benchmark's flags."""
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="also keep the table in this record, such as docs/measured/zen5.json",
    )


def keep_table(path: Path | None, name: str, table: Table, num_keys: int = 0) -> None:
    """Put a printed table into the record at `path`, in place of the former one of that name.
    Does nothing if `path` is None. With `num_keys`, former rows stay whose first `num_keys` cells
    are those of no new row: for a table that is measured in pieces."""
    if path is None:
        return
    record = read_record(path) if path.exists() else Record(processor_name(), {})
    cells = zip(*(column.cells for column in table.columns), strict=True)
    rows = [[str(cell) for cell in row] for row in cells]
    if num_keys and name in record.tables:
        measured = [row[:num_keys] for row in rows]
        former = [row for row in record.tables[name].rows if row[:num_keys] not in measured]
        rows = sorted(former + rows, key=lambda row: row[:num_keys])
    record.tables[name] = MeasuredTable(
        recorded=datetime.now(UTC).strftime("%Y-%m-%d"),
        commit=_commit(),
        command=command_line(sys.orig_argv),
        columns=[str(column.header) for column in table.columns],
        rows=rows,
    )
    write_record(path, record)


def write_record(path: Path, record: Record) -> None:
    """Write a record, a row of a table on each line."""
    lines = ["{", f'"machine": {_json(record.machine)},', '"tables": {']
    for name, table in record.tables.items():
        *fields, rows = asdict(table).items()
        lines.append(f"{_json(name)}: {{")
        lines += [f"  {_json(key)}: {_json(value)}," for key, value in fields]
        lines.append(f'  "rows": [{",".join(f"{chr(10)}    {_json(row)}" for row in rows[1])}]')
        lines.append("},")
    if record.tables:
        lines[-1] = "}"
    path.write_text("\n".join([*lines, "}}", ""]), encoding="utf-8")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def command_line(arguments: Sequence[str]) -> str:
    """A process's command without the folders of its machine."""
    program, *words = arguments
    kept = [Path(program).name]
    flags = iter(words)
    for word in flags:
        if word in _NOT_RECORDED:
            next(flags, None)
        elif not word.startswith(tuple(f"{flag}=" for flag in _NOT_RECORDED)):
            kept.append(Path(word).name if word.startswith("/") else word)
    return shlex.join(kept)


def _commit() -> str:
    """The commit of this checkout; empty if there is none."""
    command = ["git", "-C", str(_ROOT), "rev-parse", "--short=8", "HEAD"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip()
