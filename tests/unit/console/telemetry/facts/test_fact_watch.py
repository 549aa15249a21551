"""The facts of a fleet as `/fleet` and the doctor see them, without any number of requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from console.doctor.facts import KeyFacts
from console.metrics import fact_gauges
from console.telemetry.facts.fact_watch import FactWatch
from http_kit.door import SLOT_S, Door
from protocol.messages import FinishReason, Generate, Role
from protocol.registration import WorkerState
from router.fleet.conditions import StoreState
from router.routing.barriers import ApartPair
from tests.unit.router.router_harness import Consumer, Harness, request, stats_of, until


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.close()


def gauge(harness: Harness, name: str, **labels: str) -> float:
    families = {each.name: each for each in fact_gauges(harness.report.facts)}
    (value,) = [e.value for e in families[f"baton_fleet_{name}"].samples if e.labels == labels]
    return float(value)


async def test_each_worker_stands_with_its_condition(harness: Harness) -> None:
    await harness.join("d1", "d2", "p1", max_batch_size=4)
    harness.workers["d3"] = harness.make("d3", model_fingerprint="other")
    harness.refresh()
    await harness.kill("d2")
    harness.report.sample()
    facts = harness.report.facts
    assert [each.worker_id for each in facts.usable(Role.DECODE)] == ["d1"]
    assert {each.worker_id: each.cause for each in facts.missed(Role.DECODE)} == {
        "d2": "lost", "d3": "other_model",
    }  # fmt: skip
    assert facts.missed(Role.PREFILL) == []
    shown = harness.report.as_json()["pools"]
    assert (shown["decode"]["usable"], shown["decode"]["unusable"]) == (1, 2)
    assert shown["decode"]["places"] == 4
    assert gauge(harness, "workers", role="decode", state="usable") == 1
    assert gauge(harness, "workers", role="decode", state="lost") == 1
    assert gauge(harness, "unusable_workers", role="decode", cause="other_model") == 1
    assert gauge(harness, "unusable_workers", role="prefill", cause="lost") == 0


async def test_a_worker_that_starts_or_drains_is_not_missed(harness: Harness) -> None:
    await harness.join("d1")
    draining = harness.workers["d1"]
    draining.info = msgspec.structs.replace(draining.info, state=WorkerState.DRAINING)
    harness.workers["d2"] = harness.make("d2", state=WorkerState.LOADING, control="", events="")
    harness.refresh()
    harness.report.sample()
    pool = harness.report.as_json()["pools"]["decode"]
    assert (pool["usable"], pool["starting"], pool["draining"], pool["unusable"]) == (0, 1, 1, 0)


async def test_requests_that_wait_count_before_any_has_finished(harness: Harness) -> None:
    (decode,) = await harness.join("d1", max_batch_size=1)
    await decode.subscribed()
    first, second = (Consumer(harness.dispatcher, request(10, name)) for name in ("a-0", "b-0"))
    legs = [await decode.received.next(Generate) for _ in range(2)]
    decode.publish(stats_of(decode, 1))
    await until(lambda: harness.fleet.worker("d1").stats is not None)
    harness.report.targets.ttft_target_ms = 0.0
    harness.report.sample()
    assert harness.report.facts.keys == (KeyFacts(waiting=2, late=2),)
    assert gauge(harness, "waiting_requests") == gauge(harness, "late_requests") == 2
    for leg in legs:
        decode.tokens(leg, 0, [1, 2], finish=FinishReason.STOP)
    await first.end()
    await second.end()
    harness.report.targets.ttft_target_ms = 1e9
    harness.report.sample()
    assert harness.report.facts.keys == (KeyFacts(ended=2, good=2),)


async def test_the_store_s_trouble_has_a_beginning(harness: Harness) -> None:
    harness.fleet.store_state = lambda: StoreState("redis://x cannot be reached: refused")
    harness.report.sample()
    first = harness.report.as_json()["store"]
    harness.report.sample()
    assert harness.report.as_json()["store"] == first
    assert first["trouble"] == "redis://x cannot be reached: refused"
    assert first["since_us"] > 0
    harness.fleet.store_state = lambda: StoreState(notice="its certificate expires in 3 days")
    harness.report.sample()
    assert harness.report.as_json()["store"] == {
        "trouble": None,
        "since_us": None,
        "notice": "its certificate expires in 3 days",
    }


def test_the_door_counts_the_last_minute_by_key_and_status() -> None:
    now = 0.0
    door = Door(lambda: now)
    door.count("old", 200)
    now = 58.0
    for key, status in (("a", 200), ("a", 429), ("a", 429), ("b", 503)):
        door.count(key, status)
    assert door.minute() == {
        ("old", 200): 1, ("a", 200): 1, ("a", 429): 2, ("b", 503): 1,
    }  # fmt: skip
    now = 60.0 + SLOT_S
    assert ("old", 200) not in door.minute()
    now = 130.0
    assert door.minute() == {}


async def test_each_key_has_what_became_of_its_requests(harness: Harness) -> None:
    door = harness.door
    for status, number in ((200, 3), (429, 5), (400, 1), (499, 2), (503, 4), (500, 1)):
        for _ in range(number):
            door.count("batch", status)
    door.count("chat", 200)
    harness.report.sample()
    assert harness.report.facts.keys == (
        KeyFacts(name="batch", accepted=3, limited=5, invalid=1, refused=5, left=2),
        KeyFacts(name="chat", accepted=1),
    )


def test_a_pair_keeps_the_time_since_which_it_cannot_hand_over() -> None:
    pairs: list[ApartPair] = []
    fleet: Any = SimpleNamespace(apart=lambda: pairs)
    other: Any = SimpleNamespace(wall_us=lambda: 0)
    watch = FactWatch(fleet, other, other, other)

    def since(now_us: int, *found: tuple[str, str, str]) -> list[int]:
        pairs[:] = [ApartPair(*each) for each in found]
        return [each.since_us for each in watch._apart(now_us)]

    first, second = ("p1", "d1", "shm"), ("p2", "d1", "shm")
    assert since(1, first) == [1]
    assert since(2, second, ("p1", "d1", "another reason")) == [2, 1]
    assert since(3, second) == [2]
    assert since(4, first) == [4], "it could meanwhile"
