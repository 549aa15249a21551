"""`baton simulate`: a trace through a fleet in virtual time, and a report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from process.settings import settings_or_exit
from protocol.errors import ConfigError
from router.routing.decision import decide
from simulator.commands.fleets import Devices, Size, load_trace
from simulator.commands.settings import SimulateSettings
from simulator.fleet import Fleet, Outcome
from simulator.leaps import MAX_STEPS
from simulator.report.page import report_page
from simulator.report.summary import Summary, Targets, summarize
from simulator.report.text import report_table
from simulator.traces.sessions import Trace

_WIDE = 200


def main(argv: Sequence[str]) -> int:
    """Simulate and report. Raises ConfigError and ModelLoadError."""
    settings = settings_or_exit(
        SimulateSettings,
        argv,
        prog="baton simulate",
        description="Run a trace through a fleet in virtual time: latencies, goodput, load, cost.",
        section="simulate",
    )
    sizes = _sizes(settings)
    devices, trace = Devices(settings), load_trace(settings)
    targets = Targets(settings.ttft_ms, settings.tpot_ms)
    runs: list[tuple[Summary, Outcome]] = []
    for size in sizes:
        fleet = Fleet(devices.fleet(size, decide, MAX_STEPS), settings.seed)
        outcome = run_with_progress(fleet, trace, size.name)
        runs.append((summarize(size.name, outcome, targets, settings.usd_per_gpu_hour), outcome))
    title = f"{trace.name}: {devices.title}"
    if settings.html is not None:
        command = shlex.join(["baton", "simulate", *argv])
        write_page(settings.html, report_page(title, command, runs, targets))
    summaries = [summary for summary, _ in runs]
    if settings.json:
        print(json.dumps({"title": title, "fleets": [e.as_json() for e in summaries]}, indent=2))
    else:
        print_wide(report_table(title, summaries, targets))
    return 0


def _sizes(settings: SimulateSettings) -> list[Size]:
    """The fleets to simulate, one after the other."""
    sizes = []
    if settings.prefill and not settings.decode:
        raise ConfigError("--prefill needs --decode: decode workers generate the tokens")
    if settings.decode:
        sizes.append(Size(settings.prefill, settings.decode))
    if settings.colocated:
        sizes.append(Size(0, settings.colocated))
    if not sizes:
        raise ConfigError("name a fleet: --prefill 8 --decode 8, or --colocated 16, or both")
    return sizes


def run_with_progress(fleet: Fleet, trace: Trace, name: str) -> Outcome:
    """Run a trace; a terminal shows how far it is."""
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=trace.num_turns)
        return fleet.run(trace, lambda done: progress.update(task, completed=done))


def write_page(path: str, text: str) -> None:
    """Write a page. Raises ConfigError."""
    try:
        Path(path).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror}") from error


def print_wide(table: object) -> None:
    """Print a table, not folded where no terminal limits it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=_WIDE, highlight=False)
    console.print(table)
    sys.stdout.flush()
