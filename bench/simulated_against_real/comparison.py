"""Sends one load through a real fleet and through the simulator, and compares the two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from bench.replay.player import Played
from bench.simulated_against_real.fleet_profile import Profile
from bench.simulated_against_real.fleets import Shape, simulated_fleet
from bench.simulated_against_real.machine import Usage
from simulator.fleet import Fleet
from simulator.report.summary import percentile
from simulator.requests import Request
from simulator.traces.sessions import Trace

MEAN_TOTAL, MEAN_TTFT, P99_TTFT = "mean end to end", "mean TTFT", "p99 TTFT"
LIMITS = {MEAN_TOTAL: 0.05, MEAN_TTFT: 0.10, P99_TTFT: 0.20}
"""How far a simulated figure may be from the real one."""
_GAP_S = 1.0
"""Between two traces."""
_FITS = 2
"""Simulations by which the latency of links is fitted; each one halves its error at least."""


@dataclass(frozen=True)
class Figures:
    """The latencies of one run, in seconds."""

    mean_total: float
    mean_ttft: float
    p99_ttft: float

    @classmethod
    def of(cls, requests: Sequence[Played] | Sequence[Request]) -> Figures:
        """The figures of the requests that were served."""
        ttft = sorted(each.ttft_s for each in requests)
        totals = [_total_s(each) for each in requests]
        return cls(
            math.fsum(totals) / len(totals), math.fsum(ttft) / len(ttft), percentile(ttft, 0.99)
        )

    @classmethod
    def mean(cls, runs: Sequence[Figures]) -> Figures:
        """The mean of each figure over several runs."""
        return cls(
            fmean(each.mean_total for each in runs),
            fmean(each.mean_ttft for each in runs),
            fmean(each.p99_ttft for each in runs),
        )

    def by_name(self) -> dict[str, float]:
        """The figures as `LIMITS` names them."""
        return {
            MEAN_TOTAL: self.mean_total, MEAN_TTFT: self.mean_ttft, P99_TTFT: self.p99_ttft
        }  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """One load on one fleet: both runs, and what the machine did during the real one."""

    model: str
    fleet: str
    load: str
    num_requests: int
    real: Figures
    simulated: Figures
    usage: Usage

    def errors(self) -> dict[str, float]:
        """The error of each simulated figure, as a share of the real one."""
        real = self.real.by_name()
        return {name: each / real[name] - 1 for name, each in self.simulated.by_name().items()}

    @property
    def holds(self) -> bool | None:
        """Whether all figures are within their limits; None if the machine was starved."""
        if self.usage.is_starved:
            return None
        return all(abs(error) <= LIMITS[name] for name, error in self.errors().items())


def simulate(
    shape: Shape, profile: Profile, context: int, traces: Sequence[Trace], seed: int = 0
) -> dict[str, list[Request]]:
    """The simulated requests of each trace, in the order of their arrival, by the trace's name. The
    fleet serves one trace after the other, as the real one does. `seed` is that of the draws."""
    fleet = Fleet(simulated_fleet(shape, context, profile.timing), seed)
    found, num_before, begin_s = dict[str, list[Request]](), 0, 0.0
    for trace in traces:
        later = [replace(each, start_s=each.start_s + begin_s) for each in trace.sessions]
        outcome = fleet.run(Trace(trace.name, later))
        found[trace.name] = outcome.requests[num_before:]
        num_before, begin_s = len(outcome.requests), outcome.duration_s + _GAP_S
    return found


def with_handoff(shape: Shape, profile: Profile, context: int, traces: Sequence[Trace]) -> Profile:
    """The profile with the latency of links by which simulated handoffs of the mixtures, messages
    included, take as long as the real ones did. Without any, the latency stays."""
    for _ in range(_FITS if profile.handoff_s else 0):
        simulated = simulate(shape, profile, context, traces)
        took_s = [
            each.exposed_s
            for name in profile.handoffs_of
            for each in simulated[name]
            if each.prefill is not None
        ]
        if not took_s:
            break
        missing_s = profile.handoff_s - math.fsum(took_s) / len(took_s)
        profile = replace(profile, link_s=max(0.0, profile.link_s + missing_s))
    return profile


def _total_s(request: Played | Request) -> float:
    began = request.sent if isinstance(request, Played) else request.arrival
    return request.end - began
