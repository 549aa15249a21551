"""Requests under which workers die: who gets on is tried again and again, who does not is not."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from protocol.errors import GenerationFailed
from protocol.messages import AttemptFailed, FinishReason, Generate, Ping, Prefill
from router.fleet.worker import Loss
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.router_harness import Consumer, Harness, request, until

MAX_ATTEMPTS = 4


@pytest.fixture
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    """Its parameter is `silence_s`."""
    harness = Harness(max_attempts=MAX_ATTEMPTS, silence_s=getattr(request, "param", 0.2))
    yield harness
    assert harness.dispatcher.inflight == 0
    assert harness.traces.num_running == 0
    await harness.close()


async def taken_by(workers: list[FakeWorker]) -> tuple[FakeWorker, Generate]:
    """The worker that the next attempt runs on, and what it was asked."""
    await until(lambda: any(each.received.count(Generate) for each in workers))
    worker = next(each for each in workers if each.received.count(Generate))
    return worker, await worker.received.next(Generate)


async def test_after_two_deaths_without_a_token_a_request_is_not_tried_on_a_third(
    harness: Harness,
) -> None:
    workers = await harness.join("d1", "d2", "d3")
    consumer = Consumer(harness.dispatcher, request())
    for _ in range(2):
        worker, _leg = await taken_by(workers)
        workers.remove(worker)
        await harness.kill(worker.info.worker_id)
    with pytest.raises(GenerationFailed, match="request r is not tried again: 2 workers died"):
        await consumer.end()
    assert workers[0].received.count(Generate) == 0


async def test_legs_of_an_attempt_that_died_together_count_as_one_death(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    *decoders, _prefill = await harness.join("d1", "d2", "d3", "p1")
    consumer = Consumer(harness.dispatcher, request())
    first, leg = await taken_by(decoders)
    assert leg.prefill is not None
    first.answers_pings = False  # it is dead, too, but nobody has seen that yet
    known = harness.fleet.worker(first.info.worker_id)
    assert known is not None
    monkeypatch.setattr(known.link, "is_responsive", lambda now: True)  # however long that takes
    await harness.kill("p1")
    again, leg = await taken_by(decoders)
    assert again is first, "it keeps what has arrived"
    assert leg.prefill is None
    decoders.remove(first)
    await harness.kill(first.info.worker_id)
    second, _leg = await taken_by(decoders)
    decoders.remove(second)
    await harness.kill(second.info.worker_id)
    with pytest.raises(GenerationFailed, match="request r is not tried again: 2 workers died"):
        await consumer.end()
    assert decoders[0].received.count(Generate) == 0


@pytest.mark.parametrize("harness", [60.0], indirect=True)
async def test_a_leg_that_lived_on_dies_a_death_of_its_own(harness: Harness) -> None:
    """Before it gets the request again it has answered."""
    *decoders, _prefill = await harness.join("d1", "d2", "p1")
    consumer = Consumer(harness.dispatcher, request())
    first, _leg = await taken_by(decoders)
    first.answers_pings = False
    await harness.kill("p1")
    while first.received.count(Ping):
        await first.received.next(Ping)
    for _ in range(4):  # one of them for the death, the others from time to time
        await first.received.next(Ping)
    assert not any(each.received.count(Generate) for each in decoders)
    first.answers_pings = True
    again, _leg = await taken_by(decoders)
    assert again is first
    decoders.remove(first)
    await harness.kill(first.info.worker_id)
    with pytest.raises(GenerationFailed, match="request r is not tried again: 2 workers died"):
        await consumer.end()
    assert decoders[0].received.count(Generate) == 0


async def test_a_death_counts_also_where_the_handoff_was_seen_to_fail_first(
    harness: Harness,
) -> None:
    *decoders, _prefill = await harness.join("d1", "d2", "d3", "p1")
    consumer = Consumer(harness.dispatcher, request())
    first, leg = await taken_by(decoders)
    first.send(failure(leg))
    again, _leg = await taken_by(decoders)
    assert again is first, "it keeps what has arrived"
    await harness.kill("p1")
    decoders.remove(first)
    await harness.kill(first.info.worker_id)
    with pytest.raises(GenerationFailed, match="request r is not tried again: 2 workers died"):
        await consumer.end()
    assert [each.received.count(Generate) for each in decoders] == [0, 0]


async def test_a_connection_that_breaks_again_is_not_another_death(harness: Harness) -> None:
    (worker,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    for _ in range(2):
        await worker.received.next(Generate)
        lost = harness.fleet.worker("d1")
        harness.dispatcher.on_lost(lost, "its connection broke", Loss.BROKEN)
    leg = await worker.received.next(Generate)
    worker.tokens(leg, 0, [1000], finish=FinishReason.STOP)
    assert await consumer.end() == [1000]


async def test_the_token_of_a_prefill_worker_absolves_nobody(harness: Harness) -> None:
    """Else one that kills in its first decode step would get a token on with every victim."""
    *decoders, prefill = await harness.join("d1", "d2", "d3", "p1")
    consumer = Consumer(harness.dispatcher, request())
    for index in range(2):
        leg = await prefill.received.next(Prefill)
        assert leg.num_output == index
        prefill.first_token(leg, 1000 + index)
        await consumer.received(index + 1)
        worker, _leg = await taken_by(decoders)
        worker.tokens(leg, index, [1000 + index])  # which it has from the prefill worker
        decoders.remove(worker)
        await harness.kill(worker.info.worker_id)
    with pytest.raises(GenerationFailed, match="request r is not tried again: 2 workers died"):
        await consumer.end()
    assert decoders[0].received.count(Generate) == 0


async def test_workers_that_stand_still_are_not_blamed_on_a_request(harness: Harness) -> None:
    """Their connections stand until they are let go because their leases ended."""
    workers = await harness.join("d1", "d2", "d3", "d4")
    consumer = Consumer(harness.dispatcher, request())
    for _ in range(MAX_ATTEMPTS - 1):
        worker, _leg = await taken_by(workers)
        workers.remove(worker)
        await stand_still(harness, worker)
    worker, leg = await taken_by(workers)
    worker.tokens(leg, 0, [1000], finish=FinishReason.STOP)
    assert await consumer.end() == [1000]


async def stand_still(harness: Harness, worker: FakeWorker) -> None:
    """It answers nothing any more, its lease ends, and the fleet lets it go."""
    worker.answers_pings = False
    del harness.workers[worker.info.worker_id]

    def is_let_go() -> bool:
        harness.refresh()
        return harness.fleet.worker(worker.info.worker_id) is None

    await until(is_let_go)


async def test_a_stream_that_gets_on_outlives_any_number_of_workers(harness: Harness) -> None:
    workers = await harness.join("d1", "d2", "d3", "d4", "d5")
    consumer = Consumer(harness.dispatcher, request())
    for index in range(4):
        worker, leg = await taken_by(workers)
        assert leg.num_output == index
        worker.tokens(leg, index, [1000 + index])
        await consumer.received(index + 1)
        workers.remove(worker)
        await harness.kill(worker.info.worker_id)
    worker, leg = await taken_by(workers)
    worker.tokens(leg, 4, [1004], finish=FinishReason.STOP)
    assert await consumer.end() == [1000, 1001, 1002, 1003, 1004]


async def test_attempts_are_counted_since_the_last_new_token(harness: Harness) -> None:
    (worker,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    for index in range(MAX_ATTEMPTS + 1):  # the last of them would be one too many without tokens
        leg = await worker.received.next(Generate)
        worker.tokens(leg, index, [1000 + index])
        worker.send(failure(leg))
    for _ in range(MAX_ATTEMPTS - 1):
        leg = await worker.received.next(Generate)
        worker.send(failure(leg))
    with pytest.raises(GenerationFailed, match=r"request r failed after \d+ attempts"):
        await consumer.end()


def failure(leg: Generate) -> AttemptFailed:
    return AttemptFailed(
        request_id=leg.request_id,
        attempt=leg.attempt,
        worker_id="d1",
        reason="out of luck",
        retryable=True,
    )
