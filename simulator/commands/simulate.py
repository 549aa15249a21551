"""`baton simulate`: a trace through a fleet in virtual time, and a report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence

from rich.console import Console

from process.settings import settings_or_exit
from protocol.errors import ConfigError
from simulator.commands.fleets import Devices, Size
from simulator.commands.output_file import OutputFile
from simulator.commands.runs import Run, num_jobs, simulate_all, trace_of
from simulator.commands.settings import SimulateSettings
from simulator.policies.names import policy_names
from simulator.report.page import report_page
from simulator.report.summary import Targets
from simulator.report.text import comparison_table, report_table

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
    runs, devices = _runs(settings), Devices(settings)
    page = None if settings.html is None else OutputFile("--html", settings.html)
    if page is not None:
        page.check()  # fail now rather than after a long simulation
    results = simulate_all(settings, runs, num_jobs(settings.jobs), settings.usd_per_gpu_hour)
    targets = Targets(settings.ttft_ms, settings.tpot_ms)
    title = f"{trace_of(settings).title}: {devices.title}"
    if page is not None:
        command = shlex.join(["baton", "simulate", *argv])
        served = [(each.summary, each.requests) for each in results]
        page.write(report_page(title, command, served, targets))
    summaries = [each.summary for each in results]
    if settings.json:
        print(json.dumps({"title": title, "fleets": [e.as_json() for e in summaries]}, indent=2))
    elif len(policy_names(settings.policies)) > 1:
        print_wide(comparison_table(title, summaries, targets))
    else:
        print_wide(report_table(title, summaries, targets))
    if not any(each.num_served for each in summaries):
        print("baton simulate: no request was served", file=sys.stderr)
        return 1
    return 0


def _runs(settings: SimulateSettings) -> list[Run]:
    """Every fleet with every policy."""
    policies = policy_names(settings.policies)
    if len(policies) == 1:
        return [Run(size.name, size, policies[0]) for size in _sizes(settings)]
    return [
        Run(f"{size.name}, {policy}", size, policy)
        for size in _sizes(settings)
        for policy in policies
    ]


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


def print_wide(table: object) -> None:
    """Print a table, not folded where no terminal limits it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=_WIDE, highlight=False)
    console.print(table)
    print(end="", flush=True)  # before what follows on standard error; it may be closed
