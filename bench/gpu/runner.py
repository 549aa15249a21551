"""Builds, checks and measures the engine on a CUDA card; `python -m bench.gpu [--part NAME]`.

Needs no network. The cheapest and most informative parts come first, each in a process of its own.
Each row is printed and appended to a file of JSON lines as soon as it is there, so that a run that
is cut short keeps what it has. A part that fails, dies, or takes longer than its limit is a row
that says so, its standard error is kept beside the rows, and the next part runs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu.checks import Row
from bench.gpu.part_process import run_apart
from bench.gpu.parts import PARTS, Part

PART_LIMIT_S = 420.0
"""After which a part ends itself with what it has."""
_KILL_S = 55.0  # later, if it did not: a fleet takes a while to stop


class PartOverran(Exception):
    """A part took longer than its limit; the rows that it gave are kept."""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that were asked for; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all, in order")
    parser.add_argument("--output", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--here", action="store_true", help="in this process, for a debugger")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench.gpu needs a CUDA card, and torch sees none", file=sys.stderr)
        return 1
    before = options.output.stat().st_size if options.output.exists() else 0
    for name in options.part or list(PARTS):
        with options.output.open("a") as file:
            if options.here:
                for row in run_part(name, torch.device("cuda:0"), PARTS[name]):
                    _keep(row, file)
            else:
                command = [sys.executable, "-m", "bench.gpu", "--here"]
                command += [f"--part={name}", f"--output={options.output}"]
                log = options.output.with_suffix(f".{name}.log")
                reason = run_apart(command, log, PART_LIMIT_S + _KILL_S)
                if reason:
                    file.write("\n")  # after what it may have begun
                    _keep(Row(name, "process", 0.0, "failed", note=reason), file)
    rows = read_rows(options.output, before)
    if not options.here:
        Console().print(table(rows))
    has_failed = any(row.unit == "failed" for row in rows)
    return int(has_failed and not options.here)


def run_part(
    name: str, device: torch.device, part: Part, limit_s: float = PART_LIMIT_S
) -> Iterator[Row]:
    """The rows of a part as they come; one that raises, or takes longer than `limit_s`, ends with
    a row that says so, and its traceback on standard error. For the main thread."""
    started = time.monotonic()
    try:
        with _limit(limit_s):
            yield from part(device)
    except Exception as error:  # noqa: BLE001 - a failure is a result
        traceback.print_exc()
        yield Row(name, type(error).__name__, 0.0, "failed", note=_said(error))
    yield Row(name, "took", time.monotonic() - started, "s")


def read_rows(file: Path, offset: int = 0) -> list[Row]:
    """The rows in a file from a byte on, without what a process that died had half written."""
    rows = []
    for line in file.read_bytes()[offset:].splitlines():
        with suppress(ValueError):
            rows.append(Row(**json.loads(line)))
    return rows


def table(rows: list[Row]) -> Table:
    """The rows side by side."""
    made = Table("part", "what", "value", "unit", "goal", "note")
    for row in rows:
        made.add_row(row.part, row.name, f"{row.value:.4g}", row.unit, row.goal, row.note)
    return made


def _keep(row: Row, file: TextIO) -> None:
    print(json.dumps(asdict(row)), file=file, flush=True)
    shown = f"{row.part}: {row.name}: {row.value:.4g} {row.unit} {row.note}"
    print(shown, flush=True)


def _said(error: Exception) -> str:
    """What it says, and where it was raised: the last place that is ours, and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename]
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in (*ours[-1:], *frames[-1:])]
    return f"{str(error)[:300]} ({', '.join(dict.fromkeys(places))})"


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises PartOverran in the block, as soon as Python runs, once it has taken so long."""

    def overrun(number: int, frame: object) -> None:
        raise PartOverran(f"ended after {seconds:g} s with what it had")

    former = signal.signal(signal.SIGALRM, overrun)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)
