"""`baton plan`: which fleet of `--gpus` cards serves a trace best, and whether to split at all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil

from process.number_text import count
from process.settings import settings_or_exit
from process.settings.home_paths import home_path
from protocol.errors import ConfigError
from simulator.commands.fleets import Devices, Size
from simulator.commands.runs import trace_of
from simulator.commands.settings import PlanSettings
from simulator.commands.simulate import print_wide
from simulator.commands.trials import Trials, fingerprint
from simulator.fleet import Fleet
from simulator.planning.candidates import Candidate, fleets
from simulator.planning.ledger import Ledger
from simulator.planning.race import Standing, Trial, Tries, race
from simulator.policies.names import BATON, POLICIES
from simulator.report.plan import plan_table, verdict
from simulator.report.summary import Targets, summarize
from simulator.requests import Request

_TRIED_WITH_ALL_CHUNKS = 2
_USUAL_CHUNK = 2048
_ROUNDING = 1e-6
_NOT_OF_TRIALS = ("jobs", "resume", "json", "rounds", "chunks", "gpus", "tp")
"""Settings that do not affect trials, or affect them only by the choice of candidates."""


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
    devices = Devices(settings)
    cards = f"{settings.gpus} x {devices.card_name}"
    title = f"{trace_of(settings).title}: {devices.model_name}, {cards}"
    path = None if settings.resume is None else home_path(settings.resume, "--resume")
    ledger = Ledger(path, Trial)
    key_of = partial(_key, fingerprint(settings, _NOT_OF_TRIALS))
    with Trials.begun(_try, key_of, ledger, settings, settings.jobs) as trials:
        standings = _search(
            settings,
            candidates,
            lambda group, speed: trials.run([_Job(settings, each, speed) for each in group]),
        )
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
    devices.check_split(tps[0])
    able = [tp for tp in tps if tp <= settings.gpus and devices.can_split(tp)]
    found = fleets(settings.gpus, able, _usual_chunk(settings))
    if not found:
        needed = f"{devices.model_name} needs {count(settings.tp or fewest, 'GPU')}"
        raise ConfigError(f"--gpus {settings.gpus}: a worker of {needed}")
    return found


def _usual_chunk(settings: PlanSettings) -> int:
    chunks = sorted(int(each) for each in settings.chunks)
    return min(chunks, key=lambda each: abs(each - _USUAL_CHUNK))


def _search(
    settings: PlanSettings, candidates: Sequence[Candidate], tries: Tries
) -> list[Standing]:
    """The standings of all fleets; fleets that split race apart from fleets that do not, so that
    the best of each kind is known exactly. The best ones race again with all chunk budgets."""
    found: list[Standing] = []
    for splits in (False, True):
        group = [each for each in candidates if each.splits is splits]
        first = race(group, tries, 2)
        best = [each.candidate for each in first if each.speed][:_TRIED_WITH_ALL_CHUNKS]
        chunks = sorted({int(each) for each in settings.chunks})
        final = [each.with_chunks(chunk) for each in best for chunk in chunks]
        second = race(final, tries, settings.rounds)
        known = {each.candidate for each in second}
        found += [*second, *(each for each in first if each.candidate not in known)]
    return sorted(found, key=lambda each: each.rank)


@dataclass(frozen=True)
class _Job:
    """One simulation of a plan: a candidate at a speed."""

    settings: PlanSettings
    candidate: Candidate
    speed: float


def _key(base: str, job: _Job) -> str:
    return f"{base} {job.candidate} {job.speed!r}"


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
    misses: Counter[str] = Counter()
    spare = trace.num_turns - ceil(settings.good_share * trace.num_turns - _ROUNDING)

    def goes_on(request: Request) -> bool:
        missed = request.failure or targets.missed(request)
        if missed:
            misses[missed] += 1
        return misses.total() <= spare

    spec = Devices(sized).fleet(Size(candidate.prefill, candidate.decode), POLICIES[BATON])
    outcome = Fleet(spec, settings.seed).run(trace, goes_on=goes_on)
    if not outcome.is_whole:
        return Trial(passed=False, misses=dict(misses))
    summary = summarize(candidate.name, outcome, targets)
    if summary.ttft_ms is None:
        return Trial(passed=False, misses=dict(misses))
    tpot = 0.0 if summary.tpot_ms is None else summary.tpot_ms.p99
    good = (summary.goodput_per_s, summary.goodput_share)
    return Trial(True, *good, summary.ttft_ms.p99, tpot, dict(misses))
