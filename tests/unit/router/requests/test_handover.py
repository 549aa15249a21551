"""Decode workers that drain: what runs there goes on elsewhere, with its KV blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest

from protocol.events import WorkerStats
from protocol.messages import (
    Abort,
    AttemptFailed,
    FinishReason,
    Generate,
    HandedOver,
    HandOver,
    Prefill,
    PrefillDone,
)
from protocol.registration import WorkerState
from protocol.traces import DecodeTrace
from router.requests.trace_json import trace_json
from tests.unit.router.fake_worker import FakeWorker, prefill_trace
from tests.unit.router.router_harness import Consumer, Harness, all_sent, request, until

PROMPT = list(range(100))


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    assert made.dispatcher.inflight == 0
    assert made.traces.num_running == 0
    for worker_id in made.workers:
        worker = made.fleet.worker(worker_id)
        assert worker is None or worker.num_reservations == 0
    await made.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def drain(harness: Harness, worker: FakeWorker) -> None:
    worker.info = msgspec.structs.replace(worker.info, state=WorkerState.DRAINING)
    harness.refresh()


async def start(harness: Harness, num_tokens: int = 3) -> tuple[Consumer, FakeWorker, Generate]:
    """A generation that has so many tokens, the worker that it runs on, and its leg."""
    consumer = Consumer(harness.dispatcher, request())
    decoders = [each for name, each in harness.workers.items() if name.startswith("d")]
    await until(lambda: any(each.received.count(Generate) for each in decoders))
    worker = next(each for each in decoders if each.received.count(Generate))
    leg = await worker.received.next(Generate)
    if num_tokens:
        worker.tokens(leg, 0, [1000 + each for each in range(num_tokens)])
        await consumer.received(num_tokens)
    return consumer, worker, leg


def hand_over(worker: FakeWorker, order: HandOver, num_output: int, keeps_kv: bool = True) -> None:
    worker.send(
        HandedOver(
            request_id=order.request_id,
            attempt=order.attempt,
            next_attempt=order.next_attempt,
            num_output=num_output,
            keeps_kv=keeps_kv,
            trace=DecodeTrace(worker_id=worker.info.worker_id, received_us=1),
        )
    )


def prefill_done(worker: FakeWorker, leg: Generate) -> PrefillDone:
    trace = prefill_trace(worker.info.worker_id)
    return PrefillDone(request_id=leg.request_id, attempt=leg.attempt, trace=trace)


def stats(worker: FakeWorker, blocks_used: int) -> WorkerStats:
    return WorkerStats(
        worker_id=worker.info.worker_id,
        incarnation=worker.info.incarnation,
        num_waiting=0,
        num_running=0,
        queued_tokens=0,
        blocks_total=worker.info.num_blocks,
        blocks_used=blocks_used,
        blocks_cached=0,
    )


async def leave(harness: Harness) -> tuple[Consumer, FakeWorker, FakeWorker, Generate]:
    """A generation on its way from one worker to the other; the leg is the other's."""
    workers = await harness.join("d1", "d2")
    consumer, source, _ = await start(harness)
    (target,) = [each for each in workers if each is not source]
    drain(harness, source)
    order = await source.received.next(HandOver)
    hand_over(source, order, num_output=3)
    return consumer, source, target, await target.received.next(Generate)


async def end(consumer: Consumer, worker: FakeWorker, leg: Generate, index: int) -> None:
    """The worker that goes on sends the rest."""
    tokens = [1000 + each for each in range(index, 6)]
    worker.tokens(leg, index, tokens, finish=FinishReason.STOP)
    assert await consumer.end() == [1000, 1001, 1002, 1003, 1004, 1005]


async def test_the_next_attempt_takes_over_from_the_draining_worker(harness: Harness) -> None:
    consumer, source, target, leg = await leave(harness)
    assert leg.token_ids == [*PROMPT, 1000, 1001], "all that has its KV there"
    assert (leg.num_output, leg.attempt) == (2, 2)
    assert leg.prefill is not None
    assert leg.prefill.incarnation == source.info.incarnation
    target.tokens(leg, 2, [1002])
    await end(consumer, target, leg, 3)
    assert harness.metric("attempts_total", mode="handover") == 1
    assert harness.metric("retries_total") == 0
    assert source.received.count(Abort) == 0
    trace = harness.traces.get(leg.request_id)
    assert [each.failed for each in trace.attempts] == [None, None]
    assert trace.attempts[0].decode.worker_id == source.info.worker_id
    assert "drains" in trace_json(trace, 0)["placement"]["reason"]


async def test_a_handover_that_is_told_twice_ends_nothing(harness: Harness) -> None:
    await harness.join("d1", "d2")
    consumer, source, _ = await start(harness)
    drain(harness, source)
    order = await source.received.next(HandOver)
    target = harness.workers["d2" if source is harness.workers["d1"] else "d1"]
    hand_over(source, order, num_output=3)
    leg = await target.received.next(Generate)
    hand_over(source, order, num_output=3)
    await until(lambda: harness.metric("stale_messages_total") == 1)
    target.tokens(leg, 2, [1002])
    await end(consumer, target, leg, 3)
    await all_sent(harness, source)
    assert source.received.count(Abort) == 0


async def test_a_source_that_has_moved_everything_may_go(harness: Harness) -> None:
    consumer, source, target, leg = await leave(harness)
    source.send(prefill_done(source, leg))
    await until(lambda: harness.traces.get(leg.request_id).attempts[-1].prefill)
    await harness.kill(source.info.worker_id)
    target.tokens(leg, 2, [1002])
    await end(consumer, target, leg, 3)
    assert harness.metric("retries_total") == 0


async def test_a_source_that_dies_before_costs_an_ordinary_retry(harness: Harness) -> None:
    consumer, source, target, leg = await leave(harness)
    await harness.kill(source.info.worker_id)
    assert (await target.received.next(Abort)).attempt == leg.attempt
    retry = await target.received.next(Generate)
    assert (retry.attempt, retry.num_output, retry.prefill) == (3, 3, None)
    await end(consumer, target, retry, 3)


async def test_a_handover_that_fails_is_retried_and_the_source_freed(harness: Harness) -> None:
    consumer, source, target, leg = await leave(harness)
    failed = AttemptFailed(
        request_id=leg.request_id,
        attempt=leg.attempt,
        worker_id=target.info.worker_id,
        reason="a digest differs",
        retryable=True,
    )
    target.send(failed)
    assert (await source.received.next(Abort)).attempt == leg.attempt
    retry = await target.received.next(Generate)
    assert (retry.num_output, retry.prefill) == (3, None)
    await end(consumer, target, retry, 3)


async def test_a_request_without_kv_is_placed_anew_at_once(harness: Harness) -> None:
    d1, d2, prefill = await harness.join("d1", "d2", "p1")
    consumer, source, _ = await start(harness, num_tokens=0)
    first = await prefill.received.next(Prefill)
    target = d1 if source is d2 else d2
    drain(harness, source)
    hand_over(source, await source.received.next(HandOver), num_output=0, keeps_kv=False)
    assert (await prefill.received.next(Abort)).attempt == first.attempt
    leg = await target.received.next(Generate)
    assert (leg.attempt, leg.num_output) == (2, 0)
    assert leg.prefill is not None
    assert leg.prefill.worker_id == "p1"
    await end(consumer, target, leg, 0)


async def test_blocks_that_nobody_can_take_are_given_up(harness: Harness) -> None:
    """The worker that was to go on left meanwhile."""
    await harness.join("d1")
    consumer, source, _ = await start(harness)
    await harness.join("d2")
    drain(harness, source)
    order = await source.received.next(HandOver)
    await harness.kill("d2")
    hand_over(source, order, num_output=3)
    assert (await source.received.next(Abort)).attempt == order.next_attempt
    (target,) = await harness.join("d3")
    leg = await target.received.next(Generate)
    assert (leg.num_output, leg.prefill) == (3, None)
    await end(consumer, target, leg, 3)


async def test_blocks_of_tokens_that_have_not_come_are_given_up(harness: Harness) -> None:
    """The first token is still on its way from the prefill worker."""
    d1, d2, prefill = await harness.join("d1", "d2", "p1")
    consumer, source, leg = await start(harness, num_tokens=0)
    first = await prefill.received.next(Prefill)
    target = d1 if source is d2 else d2
    source.tokens(leg, 1, [1001])
    drain(harness, source)
    order = await source.received.next(HandOver)
    hand_over(source, order, num_output=2)
    assert (await source.received.next(Abort)).attempt == order.next_attempt
    assert (await prefill.received.next(Abort)).attempt == first.attempt
    again = await target.received.next(Generate)
    assert (again.attempt, again.num_output) == (order.next_attempt, 0)
    await end(consumer, target, again, 0)


async def test_without_another_decode_worker_it_stays_until_one_comes(harness: Harness) -> None:
    await harness.join("d1")
    consumer, source, _ = await start(harness)
    drain(harness, source)
    await harness.join("p1")
    assert source.received.count(HandOver) == 0
    (target,) = await harness.join("d2")
    hand_over(source, await source.received.next(HandOver), num_output=3)
    leg = await target.received.next(Generate)
    await end(consumer, target, leg, 2)


async def test_it_stays_while_no_other_worker_has_the_room(harness: Harness) -> None:
    """100 tokens of prompt and 3 of output are 26 blocks."""
    await harness.join("d1")
    consumer, source, _ = await start(harness)
    (small,) = await harness.join("d2", num_blocks=25)
    (short,) = await harness.join("d3", max_context=199)
    drain(harness, source)
    await all_sent(harness, source)
    assert source.received.count(HandOver) == 0
    (target,) = await harness.join("d4", num_blocks=26)
    hand_over(source, await source.received.next(HandOver), num_output=3)
    await end(consumer, target, await target.received.next(Generate), 2)
    assert source.received.count(HandOver) == 0
    assert small.received.count(Generate) == short.received.count(Generate) == 0


async def test_room_for_one_is_not_given_to_two(harness: Harness) -> None:
    """101 tokens are 26 blocks."""
    (source,) = await harness.join("d1")
    consumers = [Consumer(harness.dispatcher, request(request_id=name)) for name in ("r1", "r2")]
    legs = [await source.received.next(Generate) for _ in consumers]
    for leg in legs:
        source.tokens(leg, 0, [1000])
    for consumer in consumers:
        await consumer.received(1)
    await harness.join("d2", num_blocks=51)
    drain(harness, source)
    await all_sent(harness, source)
    assert source.received.count(HandOver) == 1
    for consumer, leg in zip(consumers, legs, strict=True):
        await end(consumer, source, leg, 1)


async def test_room_that_became_free_is_found(harness: Harness) -> None:
    (source,) = await harness.join("d1")
    consumer, _, _ = await start(harness)
    (target,) = await harness.join("d2", num_blocks=100)
    await target.subscribed()
    target.publish(stats(target, blocks_used=75))
    await until(lambda: harness.fleet.worker("d2").stats)
    drain(harness, source)
    assert not harness.dispatcher._generations["r"].attempt.is_leaving
    target.publish(stats(target, blocks_used=74))
    await until(lambda: harness.fleet.worker("d2").stats.blocks_used == 74)
    harness.fleet.sweep()
    hand_over(source, await source.received.next(HandOver), num_output=3)
    await end(consumer, target, await target.received.next(Generate), 2)


async def test_it_is_asked_once_and_may_finish_instead(harness: Harness) -> None:
    workers = await harness.join("d1", "d2")
    consumer, source, leg = await start(harness)
    drain(harness, source)
    await source.received.next(HandOver)
    await harness.join("d3")
    assert source.received.count(HandOver) == 0
    await end(consumer, source, leg, 3)
    assert all(each.received.count(Generate) == 0 for each in workers)


async def test_a_request_that_ended_meanwhile_is_not_kept(harness: Harness) -> None:
    await harness.join("d1", "d2")
    consumer, source, _ = await start(harness)
    drain(harness, source)
    order = await source.received.next(HandOver)
    await consumer.cancel()
    assert (await source.received.next(Abort)).attempt == order.attempt
    hand_over(source, order, num_output=3)
    assert (await source.received.next(Abort)).attempt == order.next_attempt


async def test_a_drained_worker_that_leaves_is_no_cause_for_alarm(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    (worker,) = await harness.join("d1")
    drain(harness, worker)
    with caplog.at_level(logging.INFO):
        await harness.kill("d1")
    about = [each for each in caplog.records if "d1" in each.getMessage()]
    assert about
    assert all(each.levelno == logging.INFO for each in about)


async def test_an_output_without_a_limit_moves_to_a_worker_of_similar_size(
    harness: Harness,
) -> None:
    (source,) = await harness.join("d1", max_context=400)
    open_ended = msgspec.structs.replace(request(100, max_tokens=300), is_open_ended=True)
    consumer = Consumer(harness.dispatcher, open_ended)
    leg = await source.received.next(Generate)
    source.tokens(leg, 0, [1000, 1001, 1002])
    await consumer.received(3)
    (target,) = await harness.join("d2", max_context=300)
    drain(harness, source)
    hand_over(source, await source.received.next(HandOver), num_output=3)
    moved = await target.received.next(Generate)
    assert moved.sampling.max_tokens == 200
    await end(consumer, target, moved, 2)
