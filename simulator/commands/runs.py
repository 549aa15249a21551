"""Simulations of one trace, one after the other or on several cores at once.

The trace is read once, and the other processes get it from the command: so a file that grows or is
replaced meanwhile changes nothing. Results do not depend on the number of processes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.cpu_quota import threads_within_quota
from process.cores import usable_cores
from simulator.commands.fleets import Devices, Size, load_trace, trace_options
from simulator.commands.processes import simulation_processes
from simulator.commands.settings import SimulationSettings
from simulator.fleet import Fleet
from simulator.policies.names import POLICIES
from simulator.report.summary import Summary, Targets, summarize
from simulator.requests import Request
from simulator.traces.files import TraceOptions
from simulator.traces.sessions import Trace


@dataclass(frozen=True)
class Run:
    """One simulation: a fleet of some size with a policy."""

    name: str
    size: Size
    policy: str


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    summary: Summary
    requests: list[Request]


_Part = tuple[str, TraceOptions, int]
_kept: dict[_Part, Trace] = {}
"""The trace of the command's settings, by what determines it."""


def trace_of(settings: SimulationSettings) -> Trace:
    """The trace of the settings. Raises ConfigError."""
    part = _part(settings)
    if part not in _kept:
        _kept.clear()
        _kept[part] = load_trace(settings)
    return _kept[part]


def processes_with_trace(
    settings: SimulationSettings, count: int
) -> AbstractContextManager[Executor]:
    """`simulation_processes` that have the trace of the settings."""
    return simulation_processes(count, partial(_keep, _part(settings), trace_of(settings)))


def _part(settings: SimulationSettings) -> _Part:
    return settings.trace, trace_options(settings), settings.block_size


def _keep(part: _Part, trace: Trace) -> None:
    _kept[part] = trace


def simulate(
    settings: SimulationSettings,
    run: Run,
    usd_per_gpu_hour: float | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Result:
    """Run the trace through one fleet."""
    fleet = Fleet(Devices(settings).fleet(run.size, POLICIES[run.policy]), settings.seed)
    trace = trace_of(settings)
    with _uncollected():
        outcome = fleet.run(trace, on_progress)
    targets = Targets(settings.ttft_ms, settings.tpot_ms)
    return Result(summarize(run.name, outcome, targets, usd_per_gpu_hour), outcome.requests)


def simulate_all(
    settings: SimulationSettings,
    runs: Sequence[Run],
    jobs: int,
    usd_per_gpu_hour: float | None = None,
) -> list[Result]:
    """Every run's result, in order. A terminal shows the progress."""
    num_turns = trace_of(settings).num_turns
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=num_turns * len(runs))

        def note(before: int, done: int) -> None:
            progress.update(task, completed=before * num_turns + done)

        if jobs > 1 and len(runs) > 1:
            return list(_in_processes(settings, runs, jobs, usd_per_gpu_hour, note))
        return [
            simulate(settings, run, usd_per_gpu_hour, partial(note, number))
            for number, run in enumerate(runs)
        ]


@contextmanager
def _uncollected() -> Iterator[None]:
    """A context without garbage collection: a simulation makes millions of objects, but no
    reference cycles."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def num_jobs(wanted: int | None) -> int:
    """The processes of a setting; None is one for each core that this process may use, or as many
    as a CPU quota keeps busy."""
    return wanted or threads_within_quota(len(usable_cores()))


def _in_processes(
    settings: SimulationSettings,
    runs: Sequence[Run],
    jobs: int,
    usd_per_gpu_hour: float | None,
    note: Callable[[int, int], None],
) -> Iterator[Result]:
    with processes_with_trace(settings, min(jobs, len(runs))) as pool:
        futures = [pool.submit(simulate, settings, run, usd_per_gpu_hour) for run in runs]
        for done, _ in enumerate(as_completed(futures)):
            note(done + 1, 0)
        yield from (each.result() for each in futures)
