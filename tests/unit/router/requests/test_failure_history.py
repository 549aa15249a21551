"""The rule of retries by itself: pauses, bounds, and which workers count as dead or are avoided."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import GenerationFailed
from router.fleet.worker import Loss
from router.requests.retries import FailureHistory, Retries
from router_process.settings import RouterSettings


class Steady(random.Random):
    """Draws the upper end of every range, and keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(0)
        self.ranges: list[tuple[float, float]] = []

    def uniform(self, a: float, b: float) -> float:
        self.ranges.append((a, b))
        return b


@dataclass
class FakeLink:
    pings: int = 0
    answered: set[int] = field(default_factory=set)
    waited: list[tuple[int, float]] = field(default_factory=list)

    def ping(self) -> int:
        self.pings += 1
        return self.pings

    def has_answered(self, number: int) -> bool:
        return number in self.answered

    async def wait_for_pong(self, number: int, timeout_s: float) -> None:
        self.waited.append((number, timeout_s))


def worker(name: str) -> Any:
    info = SimpleNamespace(incarnation=f"{name}-1")
    return SimpleNamespace(worker_id=name, info=info, link=FakeLink())


def attempt(decode: Any, prefill: Any = None, decode_runs: bool = False) -> Any:
    return SimpleNamespace(decode=decode, prefill=prefill, decode_runs=decode_runs)


@pytest.fixture
def settings() -> RouterSettings:
    return RouterSettings(
        model="m",
        redis_url="redis://localhost:1",
        cluster_secret="a secret of the fleet",
        max_attempts=4,
        retry_backoff_ms=100,
        retry_backoff_max_ms=250,
    )


def test_pauses_double_up_to_a_bound_and_are_jittered(settings: RouterSettings) -> None:
    rng = Steady()
    retries, failures = Retries(settings, rng), FailureHistory()
    pauses = [retries.pause_s("r", failures, number, "lost") for number in (1, 2, 3)]
    assert pauses == [0.1, 0.2, 0.25]
    assert rng.ranges == [(0.5, 1.0)] * 3
    with pytest.raises(GenerationFailed, match="request r failed after 4 attempts; the last: lost"):
        retries.pause_s("r", failures, 4, "lost")


def test_progress_makes_earlier_failures_count_no_more(settings: RouterSettings) -> None:
    retries, failures = Retries(settings, Steady()), FailureHistory()
    for _ in range(3):
        retries.pause_s("r", failures, 1, "lost")
    failures.on_progress(attempt(worker("d")), 1)
    assert retries.pause_s("r", failures, 4, "lost") == 0.1


def test_a_request_that_two_workers_died_over_is_not_tried_again(settings: RouterSettings) -> None:
    retries, failures = Retries(settings, Steady()), FailureHistory()
    failures.blame(attempt(worker("d1")), worker("d1"), Loss.BROKEN)
    assert failures.num_deaths == 1
    retries.pause_s("r", failures, 1, "lost")
    failures.blame(attempt(worker("d2")), worker("d2"), Loss.BROKEN)
    with pytest.raises(GenerationFailed, match="2 workers died over it"):
        retries.pause_s("r", failures, 2, "lost")


def test_legs_that_fall_together_are_one_death_and_one_that_lived_on_is_another() -> None:
    decode, prefill = worker("d"), worker("p")
    failures = FailureHistory()
    failures.blame(attempt(decode, prefill), prefill, Loss.BROKEN)
    assert failures.suspects == {"p-1": None, "d-1": 1}
    assert failures.prefer_decode == "d"
    failures.blame(attempt(decode), decode, Loss.BROKEN)
    assert failures.num_deaths == 1, "nothing was heard of it after the first death"
    failures = FailureHistory()
    failures.blame(attempt(decode, prefill), prefill, Loss.BROKEN)
    decode.link.answered.add(failures.suspects["d-1"])
    failures.blame(attempt(decode), decode, Loss.BROKEN)
    assert failures.num_deaths == 2


def test_a_failed_handoff_is_first_blamed_on_the_other_end() -> None:
    decode, prefill = worker("d"), worker("p")
    failures = FailureHistory()
    failures.blame(attempt(decode, prefill), decode, None)
    assert (failures.failed, failures.prefer_decode) == ({"p-1"}, "d")
    assert (failures.lost_peer, failures.num_deaths) == (prefill, 0)
    failures.blame(attempt(decode, prefill), decode, None)
    assert (failures.failed, failures.prefer_decode) == ({"p-1", "d-1"}, None)


def test_a_decode_worker_that_ran_alone_is_avoided_itself() -> None:
    decode, prefill = worker("d"), worker("p")
    failures = FailureHistory()
    failures.blame(attempt(decode, prefill, decode_runs=True), decode, None)
    assert (failures.failed, failures.prefer_decode) == ({"d-1"}, None)


def test_the_death_of_a_lost_peer_counts_once_when_it_is_seen() -> None:
    decode, prefill, other = worker("d"), worker("p"), worker("x")
    failures = FailureHistory()
    failures.blame(attempt(decode, prefill), decode, None)
    failures.count_late_death(other)
    assert failures.num_deaths == 0
    failures.count_late_death(prefill)
    failures.count_late_death(prefill)
    assert failures.num_deaths == 1
    assert failures.suspects == {"p-1": None}


def test_the_token_of_a_prefill_worker_clears_no_death() -> None:
    decode, prefill = worker("d"), worker("p")
    failures = FailureHistory()
    failures.blame(attempt(decode, prefill), prefill, Loss.BROKEN)
    failures.on_progress(attempt(decode, worker("p2")), 1)
    assert failures.num_deaths == 1
    failures.on_progress(attempt(decode, worker("p2")), 2)
    assert (failures.num_deaths, failures.suspects) == (0, {})


async def test_only_a_suspected_keeper_is_waited_for() -> None:
    decode, prefill = worker("d"), worker("p")
    failures = FailureHistory()
    await failures.wait_for_pong(decode, 1.0)
    await failures.wait_for_pong(None, 1.0)
    failures.blame(attempt(decode, prefill), prefill, Loss.BROKEN)
    await failures.wait_for_pong(decode, 2.0)
    assert decode.link.waited == [(1, 2.0)]
