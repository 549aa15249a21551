"""`baton tune`: the workers' settings that would have served a trace best. It changes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from process.settings import settings_or_exit
from process.settings.home_paths import home_path
from protocol.errors import ConfigError
from simulator.commands.fleets import Devices, Size
from simulator.commands.runs import Run, simulate, trace_of
from simulator.commands.settings import TuneSettings
from simulator.commands.simulate import print_wide
from simulator.commands.trials import Trials, fingerprint
from simulator.planning.ledger import Ledger
from simulator.planning.tuning import Knob, Served, Tried, Values, climb, gain
from simulator.policies.names import BATON
from simulator.report.summary import Targets
from simulator.report.tune import advice, tune_table
from simulator.requests import Request

_MOST_TOKENS = 1 << 16
_NOT_OF_TRIALS = ("jobs", "resume", "json", "rounds")
MEANINGS = {
    "prefill_chunk_tokens": "chunk_max_tokens of prefill workers:",
    "decode_chunk_tokens": "chunk_max_tokens of decode workers:",
    "itl_target_ms": "itl_target_ms:",
    "max_batch_size": "max_batch_size:",
}
"""What workers call the settings that may change."""


def main(argv: Sequence[str]) -> int:
    """Search and report. Raises ConfigError and ModelLoadError."""
    settings = settings_or_exit(
        TuneSettings,
        argv,
        prog="baton tune",
        description="Find the settings that would have served a trace best. Changes nothing.",
        section="tune",
    )
    num_requests = trace_of(settings).num_turns
    if num_requests < settings.parts:
        raise ConfigError(f"--parts {settings.parts}: the trace has {num_requests} requests")
    title = f"{trace_of(settings).title}: {_size(settings).name}, {Devices(settings).title}"
    knobs = _knobs(settings)
    start = {each.name: float(getattr(settings, each.name)) for each in knobs}
    path = None if settings.resume is None else home_path(settings.resume, "--resume")
    key_of = partial(_key, fingerprint(settings, [*_NOT_OF_TRIALS, *start]))
    with Trials.begun(_try, key_of, Ledger(path, Served), settings, settings.jobs) as trials:
        tried = climb(
            start,
            knobs,
            lambda group: trials.run([_Job(settings, each) for each in group]),
            settings.rounds,
        )
    if settings.json:
        print(json.dumps(_as_json(title, tried), indent=2))
    else:
        print_wide(tune_table(title, tried, MEANINGS))
        print(advice(tried, MEANINGS))
    return 0


def _size(settings: TuneSettings) -> Size:
    return Size(settings.prefill, settings.decode)


def _knobs(settings: TuneSettings) -> list[Knob]:
    """The settings that may change. Without prefill workers, decode workers' chunks are all."""
    block = float(settings.block_size)
    chunks = [Knob("decode_chunk_tokens", 2.0, block, _MOST_TOKENS)]
    if settings.prefill:
        chunks.insert(0, Knob("prefill_chunk_tokens", 2.0, block, _MOST_TOKENS))
    return [
        *chunks,
        Knob("itl_target_ms", 1.25, settings.tpot_ms / 8, settings.tpot_ms * 8),
        Knob("max_batch_size", 2.0, 1, 4096),
    ]


@dataclass(frozen=True)
class _Job:
    """A simulation of the trace with these settings."""

    settings: TuneSettings
    values: Values


def _key(base: str, job: _Job) -> str:
    return f"{base} {json.dumps(job.values, sort_keys=True)}"


def _try(job: _Job) -> Served:
    """Simulate the trace with other settings."""
    settings = job.settings
    whole = {
        name: value if name == "itl_target_ms" else round(value)
        for name, value in job.values.items()
    }
    changed = replace(settings, **whole)  # type: ignore[arg-type]
    found = simulate(changed, Run("", _size(settings), BATON))
    targets = Targets(settings.ttft_ms, settings.tpot_ms)
    requests, good = _by_parts(found.requests, settings.parts, targets)
    ttft, tpot = found.summary.ttft_ms, found.summary.tpot_ms
    return Served(
        requests,
        good,
        0.0 if ttft is None else ttft.p99,
        0.0 if tpot is None else tpot.p99,
    )


def _by_parts(
    requests: Sequence[Request], parts: int, targets: Targets
) -> tuple[list[int], list[int]]:
    """Requests and good ones in parts of the trace, by the order of their arrival."""
    counts, good = [0] * parts, [0] * parts
    for number, each in enumerate(requests):
        part = number * parts // len(requests)
        counts[part] += 1
        good[part] += not each.failure and targets.are_met(each)
    return counts, good


def _as_json(title: str, tried: Sequence[Tried]) -> dict[str, object]:
    base = tried[0].served
    return {
        "title": title,
        "advice": advice(tried, MEANINGS),
        "tried": [
            {
                "settings": dict(each.values),
                "good_share": each.served.good_share,
                "gain": vars(gain(base, each.served)),
                "ttft_p99_ms": each.served.ttft_p99_ms,
                "tpot_p99_ms": each.served.tpot_p99_ms,
            }
            for each in tried
        ],
    }
