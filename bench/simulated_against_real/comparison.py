"""Sends one load through a real fleet and through the simulator, and compares the two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.replay.player import Played
from bench.simulated_against_real.calibration import Profile, calibration_traces
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


def simulate(shape: Shape, profile: Profile, context: int, loads: Sequence[Trace]) -> list[Request]:
    """The simulated requests of the last load, in the order of their arrival. Before it, the fleet
    serves the profile's requests and the other loads, one trace after the other, as the real one
    does."""
    fleet = Fleet(simulated_fleet(shape, context, profile.timing), seed=0)
    requests, num_before, begin_s = list[Request](), 0, 0.0
    for trace in (*profile.served, *loads):
        num_before = len(requests)
        later = [replace(each, start_s=each.start_s + begin_s) for each in trace.sessions]
        outcome = fleet.run(Trace(trace.name, later))
        requests, begin_s = list(outcome.requests), outcome.duration_s + _GAP_S
    return requests[num_before:]


def with_handoff(shape: Shape, profile: Profile, context: int) -> Profile:
    """The profile with the latency of links by which simulated handoffs, messages included, take as
    long as the real ones that were measured."""
    if not profile.handoff_s:
        return replace(profile, handoff_s=2e-5)
    bare = replace(profile, handoff_s=0.0)
    lone = calibration_traces(context)[0]
    spec = simulated_fleet(shape, context, bare.timing)
    moved = [each for each in Fleet(spec, seed=0).run(lone).requests if each.prefill is not None]
    if not moved:
        return profile
    exposed = sorted(each.exposed_s for each in moved)[len(moved) // 2]
    return replace(profile, handoff_s=max(0.0, profile.handoff_s - exposed))


def _total_s(request: Played | Request) -> float:
    began = request.sent if isinstance(request, Played) else request.arrival
    return request.end - began
