"""Generations that end otherwise than by their last token: nothing of them is left anywhere."""

from __future__ import annotations

import asyncio
import random

import pytest

from protocol.errors import GenerationFailed, InvalidRequest, Overloaded, PromptTooLong
from protocol.messages import (
    Abort,
    FinishReason,
    Generate,
    Prefill,
)
from tests.unit.router.router_harness import (
    WHOLE,
    Consumer,
    Harness,
    failed,
    finish_on,
    first_with,
    request,
    until,
)


async def test_wanting_no_more_aborts_both_legs(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request())
    consumer.wants_more = False
    leg = await prefill.received.next(Prefill)
    prefill.first_token(leg, 1000)
    decode.tokens(leg, 1, [1001])
    assert await consumer.end() == [1000]
    assert harness.dispatcher.inflight == 0
    for worker in (decode, prefill):
        abort = await worker.received.next(Abort)
        assert (abort.request_id, abort.attempt) == (leg.request_id, leg.attempt)
    assert harness.metric("generations_total", outcome="closed") == 1


async def test_cancelling_the_reader_aborts_at_once(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    await decode.received.next(Generate)
    await consumer.cancel()
    assert harness.dispatcher.inflight == 0
    await decode.received.next(Abort)


async def test_a_deadline_ends_the_generation_everywhere(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request(deadline_ms=150))
    with pytest.raises(GenerationFailed, match=r"request r .* deadline"):
        await consumer.end()
    await decode.received.next(Abort)
    await prefill.received.next(Abort)
    assert harness.metric("generations_total", outcome="failed") == 1


async def test_a_deadline_bounds_the_wait_for_workers_too(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request(deadline_ms=300))
    await decode.received.next(Generate)
    await harness.kill("d1")
    with pytest.raises(GenerationFailed, match="deadline"):
        await consumer.end()


async def test_what_cannot_be_retried_fails(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    decode.send(failed(await decode.received.next(Generate), decode, retryable=False))
    with pytest.raises(GenerationFailed, match="request r failed: d1: out of luck"):
        await consumer.end()


async def test_an_output_that_has_all_its_tokens_needs_no_other_attempt(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request(max_tokens=2))
    leg = await decode.received.next(Generate)
    decode.tokens(leg, 0, WHOLE[:2])
    decode.send(failed(leg, decode))
    assert await consumer.end() == WHOLE[:2]
    assert consumer.deltas[-1].finish is FinishReason.LENGTH
    assert harness.metric("attempts_total", mode="local") == 1


async def test_attempts_are_bounded(make_harness) -> None:
    harness = make_harness(max_attempts=3)
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    for attempt in (1, 2, 3):
        leg = await decode.received.next(Generate)
        assert leg.attempt == attempt
        decode.send(failed(leg, decode))
    with pytest.raises(GenerationFailed, match="after 3 attempts"):
        await consumer.end()


async def test_nobody_comes_back(make_harness) -> None:
    harness = make_harness(recovery_wait_s=0.05)
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    await decode.received.next(Generate)
    await harness.kill("d1")
    with pytest.raises(GenerationFailed, match=r"no decode worker came back within 0\.05 s"):
        await consumer.end()


async def test_without_decode_workers_it_is_overloaded(harness: Harness) -> None:
    with pytest.raises(Overloaded, match="no decode worker is registered"):
        await Consumer(harness.dispatcher, request()).end()
    await harness.join("p1")
    with pytest.raises(Overloaded, match="no decode worker is registered"):
        await Consumer(harness.dispatcher, request()).end()


async def test_too_many_at_once_are_refused(make_harness) -> None:
    harness = make_harness(max_inflight=1)
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    leg = await decode.received.next(Generate)
    with pytest.raises(Overloaded):
        await Consumer(harness.dispatcher, request(request_id="other")).end()
    decode.tokens(leg, 0, [1], finish=FinishReason.STOP)
    await consumer.end()


async def test_stopping_ends_every_generation_and_begins_none(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumers = [Consumer(harness.dispatcher, request(request_id=f"r{each}")) for each in range(3)]
    await until(lambda: prefill.received.count(Prefill) == 3)
    harness.dispatcher.stop()
    for consumer in consumers:
        with pytest.raises(GenerationFailed, match="the router stops"):
            await consumer.end()
    await until(lambda: decode.received.count(Abort) == prefill.received.count(Abort) == 3)
    with pytest.raises(Overloaded):
        await Consumer(harness.dispatcher, request()).end()


async def test_an_id_in_use_is_refused_and_leaves_its_owner_alone(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    await until(lambda: decode.received.count(Generate) == 1)
    with pytest.raises(InvalidRequest, match="in use"):
        await Consumer(harness.dispatcher, request()).end()
    assert await finish_on(decode, consumer) == WHOLE


async def test_the_context_and_the_pool_bound_a_prompt(harness: Harness) -> None:
    await harness.join("d1", max_context=200, num_blocks=40)
    with pytest.raises(PromptTooLong, match="200 tokens, but 150 in the prompt and up to 51"):
        await Consumer(harness.dispatcher, request(150, max_tokens=51)).end()
    with pytest.raises(PromptTooLong, match=r"161 tokens, but the largest KV pool .* 160"):
        await Consumer(harness.dispatcher, request(161, max_tokens=10)).end()


async def test_generations_aborted_at_random_leave_nothing(harness: Harness) -> None:
    rng = random.Random(3)
    names = ("d1", "d2", "p1", "p2")
    workers = dict(zip(names, await harness.join(*names), strict=True))
    consumers = []
    for number in range(60):
        length = rng.choice((20, 90, 200))
        consumers.append(Consumer(harness.dispatcher, request(length, f"r{number}")))
    for number, consumer in enumerate(consumers):
        await until(lambda: any(each.received.count(Generate) for each in workers.values()))
        decode = await first_with(workers, Generate)
        leg = await decode.received.next(Generate)
        if number % 3 == 0:
            decode.tokens(leg, 0, [1000])
        if number % 5 == 0:
            await asyncio.sleep(0)
        await consumer.cancel()
    await until(lambda: harness.dispatcher.inflight == 0)
    assert harness.metric("generations_total", outcome="closed") == len(consumers)


async def test_a_generation_that_nobody_reads_is_given_up() -> None:
    """What waits for a slow client is bounded; its workers stop, nothing stays behind."""
    harness = Harness(max_unread_deltas=3)
    (worker,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request(num_tokens=8, max_tokens=100))
    leg = await worker.received.next(Generate)
    worker.tokens(leg, 0, [0])
    await consumer.received(1)
    consumer.fill()
    for index in range(1, 7):
        worker.tokens(leg, index, [index])
    assert (await worker.received.next(Abort)).attempt == leg.attempt
    assert consumer.tokens == [0]
    consumer.make_room()
    with pytest.raises(GenerationFailed, match="its client does not read"):
        await consumer.end()
    assert consumer.tokens == list(range(len(consumer.tokens)))
    assert 5 <= len(consumer.tokens) <= 6  # one more if the task had one in its hands
    assert harness.dispatcher.inflight == 0
    assert harness.metric("retries_total") == 0
    await until(lambda: harness.metric("stale_messages_total") >= 1)
    await harness.close()
