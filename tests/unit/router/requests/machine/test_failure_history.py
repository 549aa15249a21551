"""The rule of retries by itself: pauses, bounds, and which workers count as dead or are avoided."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import GenerationFailed
from router.fleet.worker import Loss
from router.requests.machine.retries import FailureHistory, Retries


class Steady(random.Random):
    """Draws the upper end of every range, and keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(0)
        self.ranges: list[tuple[float, float]] = []

    def uniform(self, a: float, b: float) -> float:
        self.ranges.append((a, b))
        return b


def worker(name: str) -> Any:
    info = SimpleNamespace(incarnation=f"{name}-1")
    return SimpleNamespace(worker_id=name, info=info, link=SimpleNamespace(last_pong=0))


def attempt(decode: Any, prefill: Any = None, decode_runs: bool = False) -> Any:
    return SimpleNamespace(decode=decode, prefill=prefill, decode_runs=decode_runs)


def die(failures: FailureHistory, attempt: Any, worker: Any) -> None:
    """A worker of the attempt is lost; its other leg gets ping 1."""
    for each in failures.on_loss(attempt, worker, Loss.BROKEN):
        failures.on_probe(each, 1)


def steady(rng: random.Random | None = None) -> Retries:
    return Retries(4, 100, 250, rng or Steady())


def test_pauses_double_up_to_a_bound_and_are_jittered() -> None:
    rng = Steady()
    retries, failures = steady(rng), FailureHistory()
    pauses = [retries.pause_s("r", failures, number, "lost") for number in (1, 2, 3)]
    assert pauses == [0.1, 0.2, 0.25]
    assert rng.ranges == [(0.5, 1.0)] * 3
    with pytest.raises(GenerationFailed, match="request r failed after 4 attempts; the last: lost"):
        retries.pause_s("r", failures, 4, "lost")


def test_progress_makes_earlier_failures_count_no_more() -> None:
    retries, failures = steady(), FailureHistory()
    for _ in range(3):
        retries.pause_s("r", failures, 1, "lost")
    failures.on_progress(attempt(worker("d")), 1)
    assert retries.pause_s("r", failures, 4, "lost") == 0.1


def test_a_request_that_two_workers_died_over_is_not_tried_again() -> None:
    retries, failures = steady(), FailureHistory()
    die(failures, attempt(worker("d1")), worker("d1"))
    assert failures.num_deaths == 1
    retries.pause_s("r", failures, 1, "lost")
    die(failures, attempt(worker("d2")), worker("d2"))
    with pytest.raises(GenerationFailed, match="2 workers died over it"):
        retries.pause_s("r", failures, 2, "lost")


def test_legs_that_fall_together_are_one_death_and_one_that_lived_on_is_another() -> None:
    decode, prefill = worker("d"), worker("p")
    failures = FailureHistory()
    die(failures, attempt(decode, prefill), prefill)
    assert failures.suspects == {"p-1": None, "d-1": 1}
    assert failures.prefer_decode == "d"
    die(failures, attempt(decode), decode)
    assert failures.num_deaths == 1, "nothing was heard of it after the first death"
    failures = FailureHistory()
    die(failures, attempt(decode, prefill), prefill)
    decode.link.last_pong = failures.suspects["d-1"]
    die(failures, attempt(decode), decode)
    assert failures.num_deaths == 2


def test_a_failed_handoff_is_first_blamed_on_the_other_end() -> None:
    decode, prefill = worker("d"), worker("p")
    failures = FailureHistory()
    failures.on_report(attempt(decode, prefill), decode)
    assert (failures.failed, failures.prefer_decode) == ({"p-1"}, "d")
    assert (failures.lost_peer, failures.num_deaths) == (prefill, 0)
    failures.on_report(attempt(decode, prefill), decode)
    assert (failures.failed, failures.prefer_decode) == ({"p-1", "d-1"}, None)


def test_a_decode_worker_that_ran_alone_is_avoided_itself() -> None:
    decode, prefill = worker("d"), worker("p")
    failures = FailureHistory()
    failures.on_report(attempt(decode, prefill, decode_runs=True), decode)
    assert (failures.failed, failures.prefer_decode) == ({"d-1"}, None)


def test_the_death_of_a_lost_peer_counts_once_when_it_is_seen() -> None:
    decode, prefill, other = worker("d"), worker("p"), worker("x")
    failures = FailureHistory()
    failures.on_report(attempt(decode, prefill), decode)
    failures.count_late_death(other)
    assert failures.num_deaths == 0
    failures.count_late_death(prefill)
    failures.count_late_death(prefill)
    assert failures.num_deaths == 1
    assert failures.suspects == {"p-1": None}


def test_the_token_of_a_prefill_worker_clears_no_death() -> None:
    decode, prefill = worker("d"), worker("p")
    failures = FailureHistory()
    die(failures, attempt(decode, prefill), prefill)
    failures.on_progress(attempt(decode, worker("p2")), 1)
    assert failures.num_deaths == 1
    failures.on_progress(attempt(decode, worker("p2")), 2)
    assert (failures.num_deaths, failures.suspects) == (0, {})


def test_only_a_suspected_keeper_is_waited_for() -> None:
    decode, prefill = worker("d"), worker("p")
    failures = FailureHistory()
    assert failures.pinged_keeper is None
    die(failures, attempt(decode, prefill), prefill)
    assert failures.pinged_keeper == (decode, 1)
    failures.avoid(decode)
    assert failures.pinged_keeper is None


def test_a_decode_worker_is_to_blame_for_what_it_did_itself() -> None:
    """Only a report of its own may mean the handoff, in which the other end had a part."""
    decode, prefill = worker("d"), worker("p")
    failures = FailureHistory()
    failures.blame(attempt(decode, prefill), decode)
    assert (failures.failed, failures.prefer_decode) == ({"d-1"}, None)
