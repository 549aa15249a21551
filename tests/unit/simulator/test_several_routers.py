"""Several routers place nearly as well as one, although each sees only what it sends itself."""

from __future__ import annotations

import random

import pytest

from protocol.messages import Role
from router.routing import fleet_view
from router.routing.decision import decide
from router.routing.placement import Targets
from scheduling.scheduler import SchedulerConfig
from simulator.fleet import Fleet, FleetSpec
from simulator.traces.sessions import Session, Trace, Turn
from simulator.worker_spec import WorkerSpec
from tests.effort import times
from tests.unit.simulator.fleets import BLOCK, LinearTimes

TTFT_MS, TIGHT_TTFT_MS = 1000.0, 300.0
RATE, REQUESTS = 20.0, 400
"""Nearly as many requests per second as two prefill workers compute."""


def share_in_time(num_routers: int, seed: int, ttft_ms: float = TTFT_MS) -> float:
    """The share of first tokens within their target. Steps take up to half a second, in which ten
    requests arrive that no report counts."""
    config = SchedulerConfig(BLOCK, 64, BLOCK, 512)
    pools = tuple(
        (WorkerSpec(role, config, 4000, 1e5, 16_000, LinearTimes(context_s=0.0)), 2)
        for role in (Role.PREFILL, Role.DECODE)
    )
    targets = Targets(ttft_ms, 100.0)
    spec = FleetSpec(pools, lambda: decide, 1e9, num_routers=num_routers, targets=targets)
    rng, now, sessions = random.Random(seed), 0.0, []
    for number in range(REQUESTS):
        now += rng.expovariate(RATE)
        turn = Turn(0.0, rng.randint(40, 160), rng.randint(2, 20))
        sessions.append(Session(f"s{number}", now, (turn,)))
    outcome = Fleet(spec, seed).run(Trace("small", sessions))
    return sum(each.ttft_s * 1000 <= ttft_ms for each in outcome.requests) / REQUESTS


@pytest.mark.parametrize("num_routers", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_first_tokens_are_nearly_as_often_in_time(num_routers: int) -> None:
    seeds = range(times(1, 3))
    one, several = (sum(share_in_time(count, seed) for seed in seeds) for count in (1, num_routers))
    assert several >= 0.98 * one


def test_routers_that_allow_for_what_others_sent_place_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = range(times(1, 3))
    allowing = sum(share_in_time(2, seed, TIGHT_TTFT_MS) for seed in seeds)
    monkeypatch.setattr(fleet_view, "others_of", lambda arrivals: 0.0)
    assert allowing > sum(share_in_time(2, seed, TIGHT_TTFT_MS) for seed in seeds)
