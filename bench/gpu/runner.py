"""Builds, checks and measures the engine on a CUDA card; `python -m bench.gpu [--part NAME]`.

Needs no network. The cheapest and most informative parts run first, each in its own process. Each
row is printed and appended to a file of JSON lines as soon as it is measured, so an interrupted run
keeps its rows. If a part fails, dies or exceeds its time limit, a row says so, its standard error
is kept beside the rows, and the next part runs.

A failure on a card may be permanent: after an illegal access every later call of the process fails,
too, and a hanging kernel cannot be ended from within. With its own process a failing part affects
no other part, and its memory is free again when the next part begins. Standard error goes to a log,
whose end says why a process died.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu.card import Row
from bench.gpu.parts import PARTS, Part

PART_LIMIT_S = 420.0
"""After this time a part ends itself and keeps its rows."""
_KILL_S = 55.0  # after the limit, if the part did not end: a fleet takes a while to stop
_TAIL_LINES = 12
_TAIL_CHARS = 1500


class PartOverran(Exception):
    """A part exceeded its time limit; its rows so far are kept."""


def main(arguments: list[str] | None = None) -> int:
    """Run the requested parts; 1 if one failed."""
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
                    file.write("\n")  # ends a row that the part may have left unfinished
                    _keep(Row(name, "process", 0.0, "failed", note=reason), file)
    rows = read_rows(options.output, before)
    if not options.here:
        Console().print(table(rows))
    has_failed = any(row.unit == "failed" for row in rows)
    return int(has_failed and not options.here)


def run_part(
    name: str, device: torch.device, part: Part, limit_s: float = PART_LIMIT_S
) -> Iterator[Row]:
    """The rows of a part as they come. A part that raises or exceeds `limit_s` ends with a row that
    says so, and its traceback goes to standard error. Call it from the main thread."""
    started = time.monotonic()
    try:
        with _limit(limit_s):
            yield from part(device)
    except Exception as error:  # noqa: BLE001 - a failure is a result
        traceback.print_exc()
        yield Row(name, type(error).__name__, 0.0, "failed", note=_message_of(error))
    yield Row(name, "took", time.monotonic() - started, "s")


def read_rows(file: Path, offset: int = 0) -> list[Row]:
    """The rows in a file from byte `offset` on, without a row left unfinished by a dead process."""
    rows = []
    for line in file.read_bytes()[offset:].splitlines():
        with suppress(ValueError):
            rows.append(Row(**json.loads(line)))
    return rows


def table(rows: list[Row]) -> Table:
    """The rows as a table."""
    made = Table("part", "what", "value", "unit", "goal", "note")
    for row in rows:
        made.add_row(row.part, row.name, f"{row.value:.4g}", row.unit, row.goal, row.note)
    return made


def _keep(row: Row, file: TextIO) -> None:
    print(json.dumps(asdict(row)), file=file, flush=True)
    shown = f"{row.part}: {row.name}: {row.value:.4g} {row.unit} {row.note}"
    print(shown, flush=True)


def _message_of(error: Exception) -> str:
    """The error's message and where it was raised: the last frame of our code, and the last."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename]
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in (*ours[-1:], *frames[-1:])]
    return f"{str(error)[:300]} ({', '.join(dict.fromkeys(places))})"


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise PartOverran in the block after `seconds`, as soon as Python code runs."""

    def overrun(number: int, frame: object) -> None:
        raise PartOverran(f"ended after {seconds:g} s with what it had")

    former = signal.signal(signal.SIGALRM, overrun)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)


def run_apart(command: Sequence[str], log: Path, limit_s: float) -> str:
    """Run a command to its end, or end it and its children after `limit_s`.

    Returns "" if it exited with status 0, else the failure and the end of its standard error.
    """
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
            happened = f"exited with status {status}" if status > 0 else _died_of(-status)
        except subprocess.TimeoutExpired:
            happened = f"did not end itself and was killed after {limit_s:g} s"
        finally:
            _kill_group(process)
    return f"{happened}: {tail_of(log)}" if process.returncode else ""


def tail_of(log: Path) -> str:
    """The last lines of the log; empty if there are none."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_TAIL_LINES:])[-_TAIL_CHARS:]


def _died_of(number: int) -> str:
    return f"died of {signal.Signals(number).name}" if number else ""


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, such as compilers, which outlive their parent."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
