"""Several routers place nearly as well as one: each tells the others what it has sent, and guesses
what they have sent otherwise."""

from __future__ import annotations

import random

import pytest

from protocol.messages import Role
from router.routing import fleet_view, stagger
from router.routing.decision import decide
from router.routing.placement import Targets
from scheduling.scheduler import SchedulerConfig
from simulator.delays import Delays
from simulator.fleet import Fleet, FleetSpec
from simulator.traces.sessions import Session, Trace, Turn
from simulator.worker_spec import WorkerSpec
from tests.effort import some, times
from tests.unit.simulator.fleets import BLOCK, LinearTimes

TTFT_MS, TIGHT_TTFT_MS = 1000.0, 300.0
RATE, REQUESTS = 20.0, 400
"""Nearly as many requests per second as two prefill workers compute."""


def share_in_time(
    num_routers: int, seed: int, ttft_ms: float = TTFT_MS, tell_s: float = 0.02, at_once: int = 1
) -> float:
    """The share of first tokens within their target. Steps take up to half a second, in which ten
    requests arrive that no report counts. So many requests come `at_once`."""
    config = SchedulerConfig(BLOCK, 64, BLOCK, 512)
    pools = tuple(
        (WorkerSpec(role, config, 4000, 1e5, 16_000, LinearTimes(context_s=0.0)), 2)
        for role in (Role.PREFILL, Role.DECODE)
    )
    targets = Targets(ttft_ms, 100.0)
    spec = FleetSpec(
        pools, lambda: decide, 1e9, num_routers=num_routers, targets=targets,
        delays=Delays(tell_s=tell_s),
    )  # fmt: skip
    rng, now, sessions = random.Random(seed), 0.0, []
    for number in range(REQUESTS):
        if number % at_once == 0:
            now += rng.expovariate(RATE / at_once)
        turn = Turn(0.0, rng.randint(40, 160), rng.randint(2, 20))
        sessions.append(Session(f"s{number}", now, (turn,)))
    outcome = Fleet(spec, seed).run(Trace("small", sessions))
    return sum(each.ttft_s * 1000 <= ttft_ms for each in outcome.requests) / REQUESTS


@pytest.mark.parametrize(
    ("num_routers", "ttft_ms"), some([(4, TIGHT_TTFT_MS), (2, TTFT_MS), (4, TTFT_MS)], 1)
)
def test_first_tokens_are_as_often_in_time(num_routers: int, ttft_ms: float) -> None:
    seeds = range(times(1, 3))
    one, several = (
        sum(share_in_time(count, seed, ttft_ms) for seed in seeds) for count in (1, num_routers)
    )
    assert several >= 0.98 * one


def test_routers_that_tell_each_other_place_better() -> None:
    seeds = range(times(1, 3))
    telling, silent = (
        sum(share_in_time(4, seed, TIGHT_TTFT_MS, tell_s) for seed in seeds)
        for tell_s in (0.02, 0.0)
    )
    assert telling > silent


def test_routers_that_allow_for_what_others_sent_untold_place_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = range(times(1, 3))
    allowing = sum(share_in_time(2, seed, TIGHT_TTFT_MS, 0.0) for seed in seeds)
    monkeypatch.setattr(fleet_view, "others_of", lambda arrivals: 0.0)
    assert allowing > sum(share_in_time(2, seed, TIGHT_TTFT_MS, 0.0) for seed in seeds)


def test_routers_that_take_turns_place_requests_of_one_moment_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = range(times(2, 4))
    in_turn = sum(share_in_time(2, seed, TIGHT_TTFT_MS, at_once=2) for seed in seeds)
    assert in_turn >= 0.98 * sum(share_in_time(1, seed, TIGHT_TTFT_MS, at_once=2) for seed in seeds)
    monkeypatch.setattr(stagger, "MOST_SHARE", 0.0)
    assert in_turn > sum(share_in_time(2, seed, TIGHT_TTFT_MS, at_once=2) for seed in seeds)
