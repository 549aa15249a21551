"""Runs the simulations of a search on several cores. Each is run once and remembered.

`fingerprint` identifies everything that all simulations of a search depend on, so that `--resume`
takes no result of another search.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from simulator.commands.processes import simulation_processes
from simulator.commands.runs import num_jobs
from simulator.commands.settings import SimulationSettings
from simulator.planning.ledger import Ledger

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


class Trials(Generic[JobT, ResultT]):
    """Runs jobs and remembers their results. `tries` runs a job, also in another process; `key_of`
    names everything that its result depends on."""

    def __init__(
        self,
        tries: Callable[[JobT], ResultT],
        key_of: Callable[[JobT], str],
        ledger: Ledger[ResultT],
        pool: Executor | None,
        progress: Progress,
    ) -> None:
        self._tries = tries
        self._key_of = key_of
        self._ledger = ledger
        self._pool = pool
        self._progress = progress
        self._task = progress.add_task("simulations", total=0)
        self._total = 0

    @classmethod
    @contextmanager
    def begun(
        cls,
        tries: Callable[[JobT], ResultT],
        key_of: Callable[[JobT], str],
        ledger: Ledger[ResultT],
        jobs: int | None,
    ) -> Iterator[Trials[JobT, ResultT]]:
        """The trials of a search, with `jobs` processes; None is one for each core."""
        console, count = Console(stderr=True), num_jobs(jobs)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            if count == 1:
                yield cls(tries, key_of, ledger, None, progress)
                return
            with simulation_processes(count) as pool:
                yield cls(tries, key_of, ledger, pool, progress)

    def run(self, jobs: Sequence[JobT]) -> list[ResultT]:
        """The results of these jobs, in order."""
        self._total += len(jobs)
        self._progress.update(self._task, total=self._total)
        keys = [self._key_of(each) for each in jobs]
        missing = [job for job, key in zip(jobs, keys, strict=True) if not self._ledger.find(key)]
        run = map if self._pool is None else self._pool.map
        made = run(self._tries, missing)
        results = []
        for key in keys:
            result = self._ledger.find(key)
            if result is None:
                result = next(made)
                self._ledger.add(key, result)
            results.append(result)
            self._progress.advance(self._task)
        return results


def fingerprint(settings: SimulationSettings, unless: Collection[str]) -> str:
    """A digest of all settings but these, and of the trace's file."""
    values = asdict(settings)
    for name in unless:
        del values[name]
    path = Path(settings.trace).expanduser()
    if path.is_file():
        stat = path.stat()
        values["trace"] = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
