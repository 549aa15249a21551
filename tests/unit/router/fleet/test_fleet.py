"""The fleet as registrations come, change and go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from protocol.events import CacheEvents
from protocol.messages import PROTOCOL_VERSION, CacheDump, CacheDumpRequest, Hello, Role
from protocol.registration import WorkerState
from tests.unit.router.router_harness import Harness, until


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def ids(harness: Harness, role: Role) -> list[str]:
    return [each.worker_id for each in harness.fleet.ready(role)]


def change(harness: Harness, worker_id: str, **fields) -> None:
    worker = harness.workers[worker_id]
    worker.info = msgspec.structs.replace(worker.info, **fields)
    harness.refresh()


async def test_members_by_role(harness: Harness) -> None:
    await harness.join("d1", "p1", "d2")
    assert ids(harness, Role.DECODE) == ["d1", "d2"]
    assert ids(harness, Role.PREFILL) == ["p1"]
    assert harness.metric("workers", role="decode") == 2
    await harness.kill("d1")
    assert ids(harness, Role.DECODE) == ["d2"]
    assert harness.metric("workers", role="decode") == 1


async def test_loading_and_draining_workers_get_nothing_new(harness: Harness) -> None:
    await harness.join("d1")
    loading = harness.make("d2", state=WorkerState.LOADING, control="", events="")
    harness.workers["d2"] = loading
    harness.refresh()
    assert ids(harness, Role.DECODE) == ["d1"]
    change(harness, "d1", state=WorkerState.DRAINING)
    assert ids(harness, Role.DECODE) == []
    assert harness.fleet.worker("d1").link.is_ready
    assert "d1 is draining" in harness.fleet.not_ready_reason()
    shown = {each["worker_id"]: each for each in harness.fleet.as_json()}
    assert (shown["d2"]["state"], shown["d2"]["connected"]) == ("loading", False)


async def test_a_worker_that_finished_loading_is_connected(harness: Harness) -> None:
    worker = harness.make("d1")
    ready = worker.info
    worker.info = msgspec.structs.replace(ready, state=WorkerState.LOADING, control="", events="")
    harness.workers["d1"] = worker
    harness.refresh()
    assert harness.fleet.identity is None
    worker.info = ready
    harness.refresh()
    await until(lambda: harness.is_usable("d1"))
    assert harness.fleet.not_ready_reason() is None


async def test_a_restarted_worker_is_another_one(harness: Harness) -> None:
    (first,) = await harness.join("d1")
    before = harness.fleet.worker("d1")
    (second,) = await harness.join("d1", incarnation="d1-2")
    assert harness.fleet.worker("d1") is not before
    assert before.link.is_closed or not before.link.is_ready
    await second.received.next(Hello)
    assert first.received.count(Hello) == 1


@pytest.mark.parametrize(
    ("fields", "what", "ours", "theirs"),
    [
        ({"model_fingerprint": "other"}, "model fingerprint", "weights", "other"),
        ({"layout_fingerprint": "tp2"}, "KV layout fingerprint", "layout", "tp2"),
        ({"protocol_version": 99}, "protocol version", str(PROTOCOL_VERSION), "99"),
    ],
)
async def test_who_differs_is_refused_once_with_both_values(
    harness: Harness, caplog: pytest.LogCaptureFixture, fields, what, ours, theirs
) -> None:
    await harness.join("d1")
    harness.workers["d2"] = harness.make("d2", **fields)
    with caplog.at_level(logging.ERROR):
        harness.refresh()
        harness.refresh()
    (record,) = caplog.records
    told = f"{what} differs: ours is {ours}, the peer's is {theirs}"
    assert record.getMessage() == f"worker d2 is not used: {told}"
    assert ids(harness, Role.DECODE) == ["d1"]


async def test_another_model_takes_over_when_nobody_serves_the_first(harness: Harness) -> None:
    await harness.join("d1")
    await harness.kill("d1")
    await harness.join("d2", model_fingerprint="other")
    assert harness.fleet.identity.model_fingerprint == "other"


async def test_the_context_is_what_every_decode_worker_takes(harness: Harness) -> None:
    assert harness.fleet.max_context is None
    await harness.join("d1", max_context=900)
    await harness.join("d2", max_context=700)
    await harness.join("p1", max_context=100)
    assert harness.fleet.max_context == 700


async def test_slow_workers_are_used_when_no_other_answers(harness: Harness) -> None:
    await harness.join("d1", "d2")
    now = 0.0
    fleet = harness.fleet
    links = [fleet.worker(each).link for each in ("d1", "d2")]
    fleet._clock = lambda: now
    now = links[0]._last_heard
    links[1]._last_heard = now - 100
    assert ids(harness, Role.DECODE) == ["d1"]
    now += 1000
    assert ids(harness, Role.DECODE) == ["d1", "d2"]


async def test_a_gap_in_the_events_asks_for_a_dump(harness: Harness) -> None:
    (worker,) = await harness.join("d1")
    await worker.subscribed()
    await worker.received.next(CacheDumpRequest)
    worker.dump = CacheDump(incarnation="d1-1", seq=7, hashes=[b"a", b"b"])
    await until(lambda: harness.index.is_synced("d1"))
    worker.publish(
        CacheEvents(worker_id="d1", incarnation="d1-1", seq=8, stored=[b"c"], removed=[b"a"])
    )
    await worker.received.next(CacheDumpRequest)
    await until(lambda: harness.index.num_blocks("d1") == 2)
    assert harness.index.match("d1", [b"b", b"c"], 0.0).held == 2
    assert harness.metric("cache_gaps_total") == 1


async def test_waiting_for_a_decode_worker_ends_when_one_is_ready(harness: Harness) -> None:
    waiting = asyncio.ensure_future(harness.fleet.wait_for_decode())
    await harness.join("p1")
    assert not waiting.done()
    await harness.join("d1")
    await waiting


async def test_a_worker_that_answers_outlives_its_registration(harness: Harness) -> None:
    """A registry that restarted is empty until every worker registered anew."""
    (worker,) = await harness.join("d1")
    before = harness.fleet.worker("d1")
    harness.fleet.update({})
    harness.fleet.sweep()
    assert harness.fleet.worker("d1") is before
    assert ids(harness, Role.DECODE) == ["d1"]
    assert [each["worker_id"] for each in harness.fleet.as_json()] == ["d1"]
    harness.refresh()
    assert harness.fleet.worker("d1") is before
    harness.fleet.update({})
    await worker.close()
    await until(lambda: harness.fleet.worker("d1") is None)


async def test_without_lease_and_answers_a_worker_is_gone(harness: Harness) -> None:
    await harness.join("d1", "d2")
    now = time.monotonic() + harness.settings.silence_s + 1
    harness.fleet._clock = lambda: now
    harness.fleet.sweep()
    assert ids(harness, Role.DECODE) == ["d1", "d2"]
    del harness.workers["d1"]
    harness.refresh()
    assert ids(harness, Role.DECODE) == ["d2"]
    assert harness.metric("workers_lost_total") == 1


async def test_who_stops_answering_long_after_its_lease_is_not_counted(harness: Harness) -> None:
    await harness.join("d1")
    harness.fleet.update({})
    assert harness.metric("workers", role="decode") == 1
    now = time.monotonic() + harness.settings.silence_s + 1
    harness.fleet._clock = lambda: now
    harness.fleet.sweep()
    assert harness.metric("workers", role="decode") == 0
