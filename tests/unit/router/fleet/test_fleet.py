"""The fleet as registrations come, change and go."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from protocol.events import CacheEvents
from protocol.messages import CacheDump, CacheDumpRequest, Generate, Hello, Role
from protocol.registration import WorkerState
from protocol.wire import MAX_FRAME_BYTES, encode
from router.fleet.worker import LONG_STEP_S, Worker
from router.routing.caches.cache_index import RETRY_S
from router.routing.worker_view import Liveness
from tests.unit.router.fleet.members import change, ids, last_heard
from tests.unit.router.router_harness import Consumer, Harness, request, stats_of, until
from worker.cache_dumps import PIECE_BLOCKS


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


async def test_links_are_looked_at_only_when_their_liveness_may_have_changed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []
    update = Worker.update_liveness

    def counted(worker: Worker, now: float) -> float:
        looked_at.append(worker.worker_id)
        return update(worker, now)

    d1, p1 = await harness.join("d1", "p1")
    d1.answers_pings = p1.answers_pings = False
    fleet, workers = harness.fleet, harness.fleet.workers()
    monkeypatch.setattr(Worker, "update_liveness", counted)
    heard = min(each.link.silent_at for each in workers) - harness.settings.silence_s
    fleet.now = lambda: heard
    fleet.on_readiness()
    for _ in range(3):
        assert len(fleet.view().ready(Role.PREFILL)) == 1
    assert looked_at == ["d1", "p1"]
    fleet.now = lambda: max(each.link.silent_at for each in workers)
    assert fleet.ready(Role.PREFILL) != []  # in a long step
    assert {each.liveness for each in workers} == {Liveness.SLOW}
    fleet.now = lambda: heard  # as after a message
    assert {each.liveness for each in fleet.ready(Role.DECODE)} == {Liveness.ANSWERS}
    await harness.kill("p1")
    assert fleet.ready(Role.PREFILL) == []


async def test_a_restarted_worker_is_another_one(harness: Harness) -> None:
    (first,) = await harness.join("d1")
    before = harness.fleet.worker("d1")
    (second,) = await harness.join("d1", incarnation="d1-2")
    assert harness.fleet.worker("d1") is not before
    assert before.link.is_closed or not before.link.is_ready
    await second.received.next(Hello)
    assert first.received.count(Hello) == 1


async def test_the_context_is_the_largest_of_a_decode_worker(harness: Harness) -> None:
    assert harness.fleet.max_context is None
    await harness.join("d1", max_context=900)
    await harness.join("d2", max_context=700)
    await harness.join("p1", max_context=100)
    assert harness.fleet.max_context == 900
    await harness.kill("d1")
    assert harness.fleet.max_context == 700


async def test_slow_workers_are_used_when_no_other_answers(harness: Harness) -> None:
    await harness.join("d1", "d2")
    now = 0.0
    fleet = harness.fleet
    links = [fleet.worker(each).link for each in ("d1", "d2")]
    fleet.now = lambda: now
    now = links[0]._last_heard
    last_heard(harness, links[1], now - 100)
    assert ids(harness, Role.DECODE) == ["d1"]
    now += 1000
    assert ids(harness, Role.DECODE) == ["d1", "d2"]


@pytest.mark.parametrize("harness", [{"silence_s": 2.0}], indirect=True)
async def test_prefill_workers_that_do_not_answer_are_left_out_after_a_long_step(
    harness: Harness,
) -> None:
    """Decode workers can compute prompts, too; but one that is alone may only be computing."""
    await harness.join("d1", "p1", "p2")
    fleet = harness.fleet
    links = [fleet.worker(each).link for each in ("p1", "p2")]
    now = time.monotonic()
    fleet.now = lambda: now
    last_heard(harness, links[1], now - 5)
    assert ids(harness, Role.PREFILL) == ["p1"], "the other one answers"
    last_heard(harness, links[0], now - 5)
    assert ids(harness, Role.PREFILL) == ["p1", "p2"], "both may be in a long step"
    now += LONG_STEP_S
    assert ids(harness, Role.PREFILL) == []


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


async def test_a_token_waits_for_one_piece_of_a_dump_at_most(harness: Harness) -> None:
    """On the connection, which keeps its order, no second piece is ever on its way."""
    worker = harness.make("d1", num_blocks=100_000)
    worker.answers_dumps = False
    worker.dump = CacheDump(
        incarnation="d1-1", seq=0, hashes=[each.to_bytes(16, "big") for each in range(100_000)]
    )
    harness.workers["d1"] = worker
    harness.refresh()
    asked = await worker.received.next(CacheDumpRequest)
    await until(lambda: harness.is_usable("d1"))
    consumer = Consumer(harness.dispatcher, request(max_tokens=1000))
    leg = await worker.received.next(Generate)
    num_pieces = 0
    while True:
        piece = worker.dump_piece(asked, PIECE_BLOCKS)
        assert len(encode(piece)) <= MAX_FRAME_BYTES
        worker.send(piece)
        worker.tokens(leg, num_pieces, [num_pieces])
        num_pieces += 1
        await consumer.received(num_pieces)
        if piece.is_last:
            break
        asked = await worker.received.next(CacheDumpRequest)
        assert asked.first == num_pieces * PIECE_BLOCKS
        assert worker.received.count(CacheDumpRequest) == 0
    assert num_pieces == -(-100_000 // PIECE_BLOCKS)
    while harness.fleet.tidy_index():
        pass
    assert harness.index.num_blocks("d1") == 100_000
    assert harness.index.is_synced("d1")
    await consumer.cancel()


async def test_a_lost_event_shows_in_the_load_report_and_a_lost_dump_is_asked_for_again(
    harness: Harness,
) -> None:
    (worker,) = await harness.join("d1")
    await worker.subscribed()
    await worker.received.next(CacheDumpRequest)
    await until(lambda: harness.index.is_synced("d1"))
    worker.answers_dumps = False
    worker.publish(msgspec.structs.replace(stats_of(worker), cache_seq=1))
    await worker.received.next(CacheDumpRequest)
    assert harness.metric("cache_gaps_total") == 1
    worker.dump = CacheDump(incarnation="d1-1", seq=1, hashes=[b"a"])
    worker.answers_dumps = True
    now = time.monotonic()
    harness.fleet.now = lambda: now
    harness.fleet.sweep()
    assert worker.received.count(CacheDumpRequest) == 0
    now += RETRY_S
    harness.fleet.sweep()
    await until(lambda: harness.index.is_synced("d1"))
    assert harness.index.match("d1", [b"a"], now).held == 1


async def test_waiting_for_a_decode_worker_ends_when_one_is_ready(harness: Harness) -> None:
    waiting = asyncio.ensure_future(harness.fleet.wait_for_decode())
    await harness.join("p1")
    assert not waiting.done()
    await harness.join("d1")
    await waiting


async def test_a_worker_that_answers_outlives_its_registration(harness: Harness) -> None:
    """A registry that restarted is empty until every worker has registered again."""
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
    harness.fleet.now = lambda: now
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
    harness.fleet.now = lambda: now
    harness.fleet.sweep()
    assert harness.metric("workers", role="decode") == 0
