"""Under overload, requests that would be late are refused, so that the others are in time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from router.routing.placement import Targets
from simulator.fleet import Fleet
from simulator.report.summary import Targets as Wanted
from simulator.requests import Request
from simulator.traces.sessions import Session, Turn
from tests.effort import some
from tests.unit.simulator.fleets import served, small_fleet

TTFT_MS, TPOT_MS = 1000.0, 60.0
CAPACITY = 10.0
"""Requests per second that two prefill workers compute, about."""
WARM_UP_S, SECONDS = 5.0, 10.0
"""Step models prove themselves in the first seconds, at half the load."""


def fleet(refuses_late: bool = True, num_routers: int = 1) -> Fleet:
    targets = Targets(TTFT_MS, TPOT_MS)
    return small_fleet(
        2, 2, num_blocks=400, targets=targets, refuses_late=refuses_late, num_routers=num_routers
    )


def traffic(
    load: float, share_of: Callable[[int], str], priority_of: Callable[[int], int], seed: int
) -> list[Session]:
    """Requests at random times, so many times as often as the fleet can serve."""
    rng, sessions, now = random.Random(seed), [], 0.0
    while now < WARM_UP_S + SECONDS:
        now += rng.expovariate((0.5 if now < WARM_UP_S else load) * CAPACITY)
        number, prompt = len(sessions), rng.randint(80, 240)
        turn = Turn(0.0, prompt, rng.randint(2, 12))
        sessions.append(Session(f"s{number}", now, (turn,), share_of(number), priority_of(number)))
    return sessions


def measured(requests: list[Request]) -> list[Request]:
    return [each for each in requests if each.arrival >= WARM_UP_S]


def good(requests: list[Request]) -> float:
    """Good requests per second."""
    wanted = Wanted(TTFT_MS, TPOT_MS)
    return sum(not each.failure and wanted.are_met(each) for each in requests) / SECONDS


def run(
    load: float, seed: int = 1, refuses_late: bool = True, num_routers: int = 1
) -> list[Request]:
    sessions = traffic(load, lambda _: "", lambda number: -(number // 3 % 3), seed)
    return measured(served(fleet(refuses_late, num_routers), *sessions).requests)


@pytest.mark.parametrize(("seed", "num_routers"), some([(1, 1), (2, 1), (1, 3)], 1))
def test_three_times_the_load_serves_as_many_in_time(seed: int, num_routers: int) -> None:
    best = max(good(run(load, seed)) for load in (1.4, 1.8))
    assert good(run(3.0, seed, num_routers=num_routers)) >= 0.95 * best
    assert good(run(3.0, seed, refuses_late=False)) < 0.5 * best, "everybody is late"


@pytest.mark.parametrize(
    ("num_routers", "most_late"), some([(4, 0.06), (1, 0.05), (2, 0.05)], 1), ids=str
)
def test_hardly_any_accepted_request_is_late(num_routers: int, most_late: float) -> None:
    """Although no router sees what the others have just sent."""
    accepted = [each for each in run(3.0, num_routers=num_routers) if not each.failure]
    late = [each for each in accepted if each.ttft_s * 1000 > TTFT_MS]
    assert len(late) <= most_late * len(accepted)


def test_the_least_urgent_are_refused_first() -> None:
    """And hardly one that is accepted is late, although more urgent ones overtake it."""
    requests = run(3.0)
    late = [each for each in requests if not each.failure and each.ttft_s * 1000 > TTFT_MS]
    assert len(late) <= 0.1 * len(requests)
    refused = Counter(each.priority for each in requests if each.failure)
    asked = Counter(each.priority for each in requests)
    shares = [refused[priority] / asked[priority] for priority in (0, -1, -2)]
    assert shares == sorted(shares)
    assert shares[0] < 0.1 < 0.5 < shares[2]


def test_a_key_that_floods_the_fleet_refuses_its_own() -> None:
    sessions = traffic(3.0, lambda number: "calm" if number % 10 == 0 else "flood", lambda _: 0, 1)
    requests = measured(served(fleet(), *sessions).requests)
    refused = {
        share: sum(bool(each.failure) for each in requests if each.share == share)
        / sum(each.share == share for each in requests)
        for share in ("calm", "flood")
    }
    assert refused["flood"] > 0.3
    assert refused["calm"] < refused["flood"] / 3
