"""Generations that end otherwise than by their last token: nothing of them is left anywhere."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from protocol.errors import (
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    UnusableConstraint,
)
from protocol.messages import Abort, FinishReason, Generate, Prefill
from protocol.registration import WorkerState
from router.requests.interface import TokenDelta
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


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_client_that_wants_no_more_gets_no_more_of_what_came_together(
    harness: Harness, is_full: bool
) -> None:
    """The decode worker's token has overtaken the first one, which may fill the sink."""
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request(deadline_ms=5000))

    def take_last(delta: TokenDelta) -> bool:
        consumer.deltas.append(delta)
        consumer.is_full = is_full
        return False

    consumer.take = take_last
    decode.tokens(await decode.received.next(Generate), 1, [1001])
    leg = await prefill.received.next(Prefill)
    await until(lambda: harness.dispatcher._generations["r"].stream.held)
    prefill.first_token(leg, 1000)
    assert await consumer.end() == [1000]


async def test_cancelling_the_reader_aborts_at_once(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    await decode.received.next(Generate)
    await consumer.cancel()
    assert harness.dispatcher.inflight == 0
    await decode.received.next(Abort)


async def test_a_deadline_ends_the_generation_everywhere(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request(deadline_ms=500))
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


async def test_a_fault_of_the_request_is_told_with_its_code_and_blames_no_worker(
    harness: Harness,
) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request())
    leg = await decode.received.next(Generate)
    answer = failed(leg, decode, retryable=False)
    decode.send(msgspec.structs.replace(answer, code="grammar_too_slow"))
    with pytest.raises(UnusableConstraint, match="request r failed: d1: out of luck") as raised:
        await consumer.end()
    assert (raised.value.status, raised.value.code) == (400, "grammar_too_slow")
    await prefill.received.next(Prefill)
    abort = await prefill.received.next(Abort)
    assert "out of luck" in abort.reason
    assert harness.metric("generations_total", outcome="failed") == 1
    assert harness.dispatcher.inflight == 0


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
    with pytest.raises(PromptTooLong, match=r"200 tokens.*150 in the prompt, 51 in"):
        await Consumer(harness.dispatcher, request(150, max_tokens=51)).end()
    with pytest.raises(PromptTooLong, match=r"161 tokens.* largest KV pool .* 160"):
        await Consumer(harness.dispatcher, request(161, max_tokens=10)).end()
    await harness.join("d2", max_context=1000, num_blocks=10)
    with pytest.raises(PromptTooLong, match=r"160 tokens.*160 in the prompt, 41 in .*No ready"):
        await Consumer(harness.dispatcher, request(160, max_tokens=41)).end()


async def test_the_smallest_worker_does_not_limit_the_others(harness: Harness) -> None:
    """A prompt that only one decode worker holds goes there; none is refused for the other."""
    (small,) = await harness.join("d1", max_context=160)
    (large,) = await harness.join("d2")
    for number in range(4):
        consumer = Consumer(harness.dispatcher, request(300, f"long{number}"))
        assert await finish_on(large, consumer) == WHOLE
    assert small.received.count(Generate) == 0
    with pytest.raises(PromptTooLong, match="length is 2048 tokens"):
        await Consumer(harness.dispatcher, request(150, max_tokens=10**6)).end()


async def test_an_output_without_a_limit_ends_where_its_worker_s_context_does(
    harness: Harness,
) -> None:
    """Workers whose pools differ by little all take such requests; a much smaller one does not."""
    workers = {}
    for name, context in (("d1", 400), ("d2", 390), ("d3", 120)):
        (workers[name],) = await harness.join(name, max_context=context)
    seen = set()
    for number in range(4):
        if number == 2:  # with the largest gone, the next one's context is the limit
            await harness.kill("d1")
            del workers["d1"]
        open_ended = msgspec.structs.replace(
            request(100, f"open{number}", max_tokens=300), is_open_ended=True
        )
        consumer = Consumer(harness.dispatcher, open_ended)
        chosen = await first_with(workers, Generate)
        leg = await chosen.received.next(Generate)
        assert leg.sampling.max_tokens == chosen.info.max_context - 100
        seen.add(chosen.info.worker_id)
        chosen.tokens(leg, 0, WHOLE, finish=FinishReason.LENGTH)
        assert await consumer.end() == WHOLE
    assert "d2" in seen
    assert "d3" not in seen


async def test_while_the_large_worker_is_away_the_caller_may_come_again(harness: Harness) -> None:
    await harness.join("d1", max_context=160)
    for name, state in (("d2", WorkerState.DRAINING), ("d3", WorkerState.STALLED)):
        harness.workers[name] = harness.make(name, state=state)
    stalled = harness.workers.pop("d3")
    harness.refresh()
    with pytest.raises(PromptTooLong):
        await Consumer(harness.dispatcher, request(300)).end()
    harness.workers["d3"] = stalled
    harness.refresh()
    with pytest.raises(Overloaded, match="accepts that many is not ready"):
        await Consumer(harness.dispatcher, request(300, "again")).end()


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
