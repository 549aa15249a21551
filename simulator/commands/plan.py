"""`baton plan`: which fleet of `--gpus` cards serves a trace best, and whether to split at all."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from process.settings import settings_or_exit
from protocol.errors import ConfigError
from simulator.commands.fleets import Devices, Size
from simulator.commands.runs import num_jobs, trace_of
from simulator.commands.settings import PlanSettings
from simulator.commands.simulate import print_wide
from simulator.fleet import Fleet
from simulator.planning.candidates import Candidate, fleets
from simulator.planning.ledger import Ledger
from simulator.planning.race import Standing, Trial, race
from simulator.policies.names import BATON, POLICIES
from simulator.report.plan import plan_table, verdict
from simulator.report.summary import Targets, summarize
from simulator.requests import Request

_TRIED_WITH_ALL_CHUNKS = 2
_USUAL_CHUNK = 2048


def main(argv: Sequence[str]) -> int:
    """Search and report. Raises ConfigError and ModelLoadError."""
    settings = settings_or_exit(
        PlanSettings,
        argv,
        prog="baton plan",
        description="Find the fleet of --gpus cards that serves a trace best.",
        section="plan",
    )
    candidates = _fleets(settings)
    title = f"{trace_of(settings).name}: {settings.gpus} x {Devices(settings).card_name}"
    path = None if settings.resume is None else Path(settings.resume).expanduser()
    ledger = Ledger(path, Trial)
    with _Trials.begun(settings, ledger) as trials:
        standings = _search(settings, candidates, trials)
    if settings.json:
        ranking = [{"fleet": each.candidate.name, **asdict(each)} for each in standings]
        found = {"title": title, "verdict": verdict(standings), "ranking": ranking}
        print(json.dumps(found, indent=2))
    else:
        print_wide(plan_table(title, standings))
        print(verdict(standings))
    return 0


def _fleets(settings: PlanSettings) -> list[Candidate]:
    """Fleets whose workers hold the model, all with the usual chunks."""
    devices = Devices(settings)
    fewest = devices.fewest_fitting()
    tps = [settings.tp] if settings.tp else [fewest, 2 * fewest, 4 * fewest]
    found = fleets(settings.gpus, [tp for tp in tps if tp <= settings.gpus], _usual_chunk(settings))
    if not found:
        raise ConfigError(f"--gpus {settings.gpus}: a worker needs {settings.tp or fewest}")
    return found


def _usual_chunk(settings: PlanSettings) -> int:
    chunks = sorted(int(each) for each in settings.chunks)
    return min(chunks, key=lambda each: abs(each - _USUAL_CHUNK))


def _search(
    settings: PlanSettings, candidates: Sequence[Candidate], trials: _Trials
) -> list[Standing]:
    """The standings of all fleets; fleets that split and that do not race by themselves, so that
    the best of each is known exactly. The best ones race again with all chunk budgets."""
    found: list[Standing] = []
    for splits in (False, True):
        group = [each for each in candidates if each.splits is splits]
        first = race(group, trials.run, 2)
        best = [each.candidate for each in first if each.speed][:_TRIED_WITH_ALL_CHUNKS]
        chunks = sorted({int(each) for each in settings.chunks})
        final = [each.with_chunks(chunk) for each in best for chunk in chunks]
        second = race(final, trials.run, settings.rounds)
        known = {each.candidate for each in second}
        found += [*second, *(each for each in first if each.candidate not in known)]
    return sorted(found, key=lambda each: each.rank)


@dataclass(frozen=True)
class _Job:
    """One simulation of a plan: a candidate at a speed."""

    settings: PlanSettings
    candidate: Candidate
    speed: float


class _Trials:
    """Tries candidates, on several cores at once; each trial is done once, and remembered."""

    def __init__(
        self,
        settings: PlanSettings,
        ledger: Ledger[Trial],
        pool: Executor | None,
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._pool = pool
        self._progress = progress
        self._task = progress.add_task("simulations", total=0)
        self._total = 0
        self._base = _fingerprint(settings)

    @classmethod
    @contextmanager
    def begun(cls, settings: PlanSettings, ledger: Ledger[Trial]) -> Iterator[_Trials]:
        """The trials of a search, with their processes."""
        console, jobs = Console(stderr=True), num_jobs(settings.jobs)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            if jobs == 1:
                yield cls(settings, ledger, None, progress)
                return
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(jobs, context) as pool:
                yield cls(settings, ledger, pool, progress)

    def run(self, candidates: Sequence[Candidate], speed: float) -> list[Trial]:
        """The trials of these candidates at one speed; see `planning.race`."""
        self._total += len(candidates)
        self._progress.update(self._task, total=self._total)
        jobs = [_Job(self._settings, each, speed) for each in candidates]
        keys = [f"{self._base} {each} {speed!r}" for each in candidates]
        missing = [job for job, key in zip(jobs, keys, strict=True) if not self._ledger.find(key)]
        made = map(_try, missing) if self._pool is None else self._pool.map(_try, missing)
        trials = []
        for key in keys:
            trial = self._ledger.find(key)
            if trial is None:
                trial = next(made)
                self._ledger.add(key, trial)
            trials.append(trial)
            self._progress.advance(self._task)
        return trials


def _try(job: _Job) -> Trial:
    """Simulate a candidate, until it is clear that too many requests are not good."""
    settings, candidate = job.settings, job.candidate
    chunk = candidate.chunk_tokens
    sized = replace(
        settings,
        tp=candidate.tp,
        prefill_chunk_tokens=chunk,
        decode_chunk_tokens=min(chunk, _USUAL_CHUNK) if candidate.splits else chunk,
    )
    trace = trace_of(settings).faster(job.speed)
    targets = Targets(settings.ttft_ms, settings.tpot_ms)
    spare = (1 - settings.good_share) * trace.num_turns

    def goes_on(request: Request) -> bool:
        nonlocal spare
        if request.failure or not targets.are_met(request):
            spare -= 1
        return spare >= 0

    spec = Devices(sized).fleet(Size(candidate.prefill, candidate.decode), POLICIES[BATON])
    outcome = Fleet(spec, settings.seed).run(trace, goes_on=goes_on)
    if not outcome.is_whole:
        return Trial(passed=False)
    summary = summarize(candidate.name, outcome, targets)
    if summary.ttft_ms is None:
        return Trial(passed=False)
    tpot = 0.0 if summary.tpot_ms is None else summary.tpot_ms.p99
    good = (summary.goodput_per_s, summary.goodput_share)
    return Trial(True, *good, summary.ttft_ms.p99, tpot)


def _fingerprint(settings: PlanSettings) -> str:
    """Everything that a trial depends on besides its candidate and speed."""
    values = asdict(settings)
    for name in ("jobs", "resume", "json", "rounds", "chunks", "gpus", "tp"):
        del values[name]
    path = Path(settings.trace).expanduser()
    if path.is_file():
        stat = path.stat()
        values["trace"] = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
