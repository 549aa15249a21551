"""Runs the simulations of a search on several cores. Each is run once and remembered.

`fingerprint` identifies everything that all simulations of a search depend on, so that `--resume`
takes no result of another search.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from typing import Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from process.settings.home_paths import home_path
from process.version import baton_version
from simulator.commands.runs import num_jobs, processes_with_trace
from simulator.commands.settings import SimulationSettings
from simulator.devices.model_shape import config_file
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
        settings: SimulationSettings,
        jobs: int | None,
    ) -> Iterator[Trials[JobT, ResultT]]:
        """The trials of a search, with `jobs` processes; None is one for each core."""
        console, count = Console(stderr=True), num_jobs(jobs)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            if count == 1:
                yield cls(tries, key_of, ledger, None, progress)
                return
            with processes_with_trace(settings, count) as pool:
                yield cls(tries, key_of, ledger, pool, progress)

    def run(self, jobs: Sequence[JobT]) -> list[ResultT]:
        """The results of these jobs, in order. Each is remembered as soon as it is there."""
        self._total += len(jobs)
        self._progress.update(self._task, total=self._total)
        keys = [self._key_of(each) for each in jobs]
        found = {key: self._ledger.find(key) for key in keys}
        missing = {key: job for key, job in zip(keys, jobs, strict=True) if found[key] is None}
        self._progress.advance(self._task, len(jobs) - len(missing))
        results = {key: each for key, each in found.items() if each is not None}
        for key, result in self._made(missing):
            self._ledger.add(key, result)
            self._progress.advance(self._task)
            results[key] = result
        return [results[key] for key in keys]

    def _made(self, jobs: Mapping[str, JobT]) -> Iterator[tuple[str, ResultT]]:
        """The jobs' results with their keys, as they come."""
        if self._pool is None:
            for key, job in jobs.items():
                yield key, self._tries(job)
            return
        futures = {self._pool.submit(self._tries, job): key for key, job in jobs.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()


def fingerprint(settings: SimulationSettings, unless: Collection[str]) -> str:
    """A digest of all settings but these, of the versions of the files that they name, and of
    Baton's version."""
    values = {**asdict(settings), "version": baton_version()}
    for name in unless:
        del values[name]
    paths = {name: home_path(values[name], f"--{name}") for name in ("trace", "gpu")}
    for name, path in {**paths, "model": config_file(settings.model)}.items():
        if path.is_file():
            stat = path.stat()
            values[name] = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
