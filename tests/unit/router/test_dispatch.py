"""Generations over fake workers: every way they may go, and that none leaves anything behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable

import pytest

from protocol.errors import GenerationFailed, InvalidRequest, Overloaded, PromptTooLong
from protocol.hashing import block_hashes, chain_root
from protocol.messages import (
    Abort,
    AttemptFailed,
    CacheEvents,
    ChunkSpan,
    DecodeTrace,
    FinishReason,
    Generate,
    Prefill,
    PrefillDone,
    SequenceTokens,
    StepTokens,
    WorkerStats,
)
from protocol.sampling import PromptLogprobs, TokenLogprobs
from router.cache_index import PrefixMatch
from router.generation import TokenDelta
from tests.unit.router.fake_worker import FakeWorker, prefill_trace
from tests.unit.router.router_harness import Consumer, Harness, request, until


@pytest.fixture
async def make_harness() -> AsyncIterator[Callable[..., Harness]]:
    """Harnesses that must be clean when the test ends."""
    made: list[Harness] = []

    def make(**settings) -> Harness:
        made.append(Harness(**settings))
        return made[-1]

    yield make
    for harness in made:
        assert harness.dispatcher.inflight == 0
        assert harness.traces.num_running == 0
        assert harness.metric("inflight") == 0
        for worker_id in harness.workers:
            worker = harness.fleet.worker(worker_id)
            assert worker is None or worker.num_reservations == 0
        await harness.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
def harness(make_harness) -> Harness:
    return make_harness()


def failed(leg, worker, *, retryable: bool = True) -> AttemptFailed:
    return AttemptFailed(
        request_id=leg.request_id,
        attempt=leg.attempt,
        worker_id=worker.info.worker_id,
        reason="out of luck",
        retryable=retryable,
    )


async def finish_on(worker, consumer: Consumer, index: int = 0) -> list[int]:
    """Serve the next Generate whole, each token being 1000 + its index."""
    leg = await worker.received.next(Generate)
    assert leg.num_output == index
    worker.tokens(leg, index, [1000 + each for each in range(index, 6)], finish=FinishReason.STOP)
    return await consumer.end()


WHOLE = [1000, 1001, 1002, 1003, 1004, 1005]


TOLD = PromptLogprobs(0, bytes(4 * 99), bytes(4 * 99), b"", b"")

# -- the ways a generation goes well -----------------------------------------------------------


async def test_a_new_prompt_runs_on_both_legs_at_once(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request())
    generate = await decode.received.next(Generate)
    leg = await prefill.received.next(Prefill)
    assert (leg.request_id, leg.attempt) == (generate.request_id, generate.attempt)
    assert leg.token_ids == generate.token_ids == list(range(100))
    assert generate.prefill is not None
    assert generate.prefill.control == prefill.info.control
    assert 0 < leg.deadline_ms <= 20_000

    prefill.first_token(leg, 1000, cached_tokens=32)
    await consumer.received(1)
    decode.tokens(generate, 0, [1000, 1001], cached_tokens=32)
    decode.tokens(generate, 2, [1002])
    decode.tokens(generate, 3, [1003], finish=FinishReason.LENGTH)
    assert await consumer.end() == [1000, 1001, 1002, 1003]
    assert [each.finish for each in consumer.deltas[-2:]] == [None, FinishReason.LENGTH]
    assert {each.cached_tokens for each in consumer.deltas} == {32}
    assert harness.metric("duplicate_tokens_total") == 1
    assert harness.metric("generations_total", outcome="finished") == 1
    assert decode.received.count(Abort) == prefill.received.count(Abort) == 0


async def test_without_prefill_workers_the_decode_worker_does_it_all(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    leg = await decode.received.next(Generate)
    assert leg.prefill is None
    decode.tokens(leg, 0, [1000], cached_tokens=16)
    decode.tokens(leg, 1, WHOLE[1:], finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE
    assert consumer.deltas[0].cached_tokens == 16


async def test_a_short_prompt_stays_on_its_decode_worker(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request(num_tokens=64))
    assert await finish_on(decode, consumer) == WHOLE
    assert prefill.received.count(Prefill) == 0


async def test_a_cached_prefix_goes_to_who_holds_it(harness: Harness) -> None:
    """The next turn: only the suffix is missing, so no prefill worker is asked."""
    decode, other, _ = await harness.join("d1", "d2", "p1")
    first = Consumer(harness.dispatcher, request(num_tokens=400, request_id="turn-1"))
    await until(lambda: decode.received.count(Generate) + other.received.count(Generate) == 1)
    holder = decode if decode.received.count(Generate) else other
    await holder.subscribed()
    await finish_on(holder, first)

    holder.publish(
        CacheEvents(
            worker_id=holder.info.worker_id,
            incarnation=holder.info.incarnation,
            seq=1,
            stored=block_hashes(chain_root("weights"), list(range(400)), 4),
            removed=[],
        )
    )
    await until(lambda: harness.index.num_blocks(holder.info.worker_id) == 100)
    second = Consumer(harness.dispatcher, request(num_tokens=420, request_id="turn-2"))
    leg = await holder.received.next(Generate)
    assert leg.prefill is None
    holder.tokens(leg, 0, [7], finish=FinishReason.STOP)
    assert await second.end() == [7]


async def test_the_first_token_may_be_the_last(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request(max_tokens=1))
    leg = await prefill.received.next(Prefill)
    prefill.first_token(leg, 1000, finish=FinishReason.LENGTH)
    assert await consumer.end() == [1000]
    assert consumer.deltas[-1].finish is FinishReason.LENGTH
    await decode.received.next(Generate)
    assert decode.received.count(Abort) == 0


async def test_logprobs_stay_with_their_tokens(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request(logprobs=0))
    leg = await prefill.received.next(Prefill)
    generate = await decode.received.next(Generate)
    probs = [TokenLogprobs(logprob=-float(each)) for each in range(4)]
    decode.tokens(generate, 0, [1000, 1001], logprobs=probs[:2])
    await consumer.received(2)
    decode.tokens(generate, 1, [1001, 1002, 1003], logprobs=probs[1:], finish=FinishReason.STOP)
    await consumer.end()
    assert leg.sampling.logprobs == 0
    assert [prob for delta in consumer.deltas for prob in delta.logprobs or []] == probs


async def test_tokens_that_overtook_the_first_one_wait_for_it(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request())
    generate = await decode.received.next(Generate)
    leg = await prefill.received.next(Prefill)
    decode.tokens(generate, 1, [1001])
    decode.tokens(generate, 2, [1002, 1003])
    decode.send(harness_marker(generate))
    await until(lambda: harness.metric("stale_messages_total") == 1)
    assert consumer.tokens == []
    prefill.first_token(leg, 1000)
    await consumer.received(4)
    decode.tokens(generate, 4, [1004, 1005], finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE


def harness_marker(leg) -> AttemptFailed:
    """A message that is counted when it is seen: whatever was sent before it was seen too."""
    return AttemptFailed(
        request_id="nobody", attempt=leg.attempt, worker_id="x", reason="", retryable=True
    )


# -- attempts that fail ------------------------------------------------------------------------


async def test_a_failed_prefill_goes_to_another_with_the_same_decode_worker(
    harness: Harness,
) -> None:
    workers = {each.info.worker_id: each for each in await harness.join("d1", "d2", "p1", "p2")}
    consumer = Consumer(harness.dispatcher, request())
    decode = await first_with(workers, Generate)
    prefill = await first_with(workers, Prefill)
    leg = await prefill.received.next(Prefill)
    first = await decode.received.next(Generate)
    await burden(harness, decode)
    prefill.send(failed(leg, prefill))
    abort = await decode.received.next(Abort)
    assert (abort.request_id, abort.attempt) == (first.request_id, first.attempt)

    again = await decode.received.next(Generate)
    other = workers["p2" if prefill is workers["p1"] else "p1"]
    assert again.attempt > first.attempt
    assert again.prefill is not None
    assert again.prefill.worker_id == other.info.worker_id
    leg = await other.received.next(Prefill)
    other.first_token(leg, 1000)
    decode.tokens(again, 1, WHOLE[1:], finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE
    assert harness.metric("retries_total") == 1


async def burden(harness: Harness, worker: FakeWorker) -> None:
    """So much load that nothing but a preference brings a request there."""
    known = harness.fleet.worker(worker.info.worker_id)
    assert known is not None
    await worker.subscribed()
    worker.publish(stats_of(worker, num_running=100))
    await until(lambda: known.stats is not None)


async def first_with(workers: dict, kind: type):
    await until(lambda: any(each.received.count(kind) for each in workers.values()))
    return next(each for each in workers.values() if each.received.count(kind))


async def test_a_handoff_that_fails_keeps_the_decode_worker_once(harness: Harness) -> None:
    """First the prefill worker is avoided; when the decode worker fails again, it is."""
    workers = {each.info.worker_id: each for each in await harness.join("d1", "d2", "p1", "p2")}
    consumer = Consumer(harness.dispatcher, request())
    decode = await first_with(workers, Generate)
    first = await decode.received.next(Generate)
    await burden(harness, decode)
    decode.send(failed(first, decode))
    second = await decode.received.next(Generate)
    assert second.prefill is not None
    assert first.prefill is not None
    assert second.prefill.worker_id != first.prefill.worker_id
    decode.send(failed(second, decode))
    other = workers["d2" if decode is workers["d1"] else "d1"]
    assert await finish_on(other, consumer) == WHOLE


async def test_a_lost_decode_worker_is_replaced_in_mid_stream(harness: Harness) -> None:
    workers = {each.info.worker_id: each for each in await harness.join("d1", "d2")}
    consumer = Consumer(harness.dispatcher, request())
    decode = await first_with(workers, Generate)
    leg = await decode.received.next(Generate)
    decode.tokens(leg, 0, WHOLE[:2])
    decode.tokens(leg, 2, [1002])
    await consumer.received(3)
    await harness.kill(decode.info.worker_id)

    other = workers["d2" if decode is workers["d1"] else "d1"]
    again = await other.received.next(Generate)
    assert again.token_ids == [*range(100), 1000, 1001, 1002]
    assert again.num_output == 3
    assert again.attempt == leg.attempt + 1
    assert again.sampling == leg.sampling
    other.tokens(again, 3, WHOLE[3:], finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE


async def test_a_killed_worker_is_noticed_by_its_connection(harness: Harness) -> None:
    """Long before its lease ends."""
    workers = {each.info.worker_id: each for each in await harness.join("d1", "d2")}
    consumer = Consumer(harness.dispatcher, request())
    decode = await first_with(workers, Generate)
    leg = await decode.received.next(Generate)
    decode.tokens(leg, 0, WHOLE[:1])
    await consumer.received(1)
    await decode.close()
    other = workers["d2" if decode is workers["d1"] else "d1"]
    assert await finish_on(other, consumer, index=1) == WHOLE


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_what_is_told_of_a_prompt_is_handed_on_once_over_all_attempts(
    harness: Harness, first: str
) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request(prompt_logprobs=0))
    leg = await decode.received.next(Generate)
    assert leg.sampling.prompt_logprobs == 0
    if first == "prefill":
        prefill.first_token(await prefill.received.next(Prefill), 1000, told=TOLD)
    else:
        decode.tokens(leg, 0, [1000], prompt_logprobs=TOLD)
    await consumer.received(1)
    decode.tokens(leg, 0, [1000], prompt_logprobs=TOLD)
    decode.send(failed(leg, decode))
    assert await finish_on(decode, consumer, index=1) == WHOLE
    assert [each.prompt_logprobs for each in consumer.deltas] == [TOLD, None]


async def test_an_attempt_that_does_not_tell_of_the_prompt_fails_and_another_one_does(
    harness: Harness,
) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request(prompt_logprobs=0))
    decode.tokens(await decode.received.next(Generate), 0, [1000])
    leg = await decode.received.next(Generate)
    assert (leg.attempt, leg.num_output) == (2, 0)
    decode.tokens(leg, 0, WHOLE, finish=FinishReason.STOP, prompt_logprobs=TOLD)
    assert await consumer.end() == WHOLE
    assert [each.prompt_logprobs for each in consumer.deltas] == [TOLD]


async def test_a_prompt_to_be_told_of_is_placed_as_if_nothing_of_it_were_cached(
    harness: Harness,
) -> None:
    decode, _ = await harness.join("d1", "p1")
    await decode.subscribed()
    stored = block_hashes(chain_root("weights"), list(range(100)), 4)
    incarnation = decode.info.incarnation
    decode.publish(
        CacheEvents(worker_id="d1", incarnation=incarnation, seq=1, stored=stored, removed=[])
    )
    await until(lambda: harness.index.num_blocks("d1") == len(stored))
    is_remote = []
    for sampling in ({}, {"prompt_logprobs": 0}):
        consumer = Consumer(harness.dispatcher, request(**sampling))
        leg = await decode.received.next(Generate)
        is_remote.append(leg.prefill is not None)
        decode.tokens(leg, 0, WHOLE, finish=FinishReason.STOP, prompt_logprobs=TOLD)
        assert await consumer.end() == WHOLE
    assert is_remote == [False, True]


async def test_the_only_worker_is_tried_again(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    decode.send(failed(await decode.received.next(Generate), decode))
    assert await finish_on(decode, consumer) == WHOLE


async def test_a_failed_prefill_worker_is_not_needed(harness: Harness) -> None:
    """With the only prefill worker avoided, the decode worker prefills by itself."""
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request())
    prefill.send(failed(await prefill.received.next(Prefill), prefill))
    await decode.received.next(Generate)
    again = await decode.received.next(Generate)
    assert again.prefill is None
    decode.tokens(again, 0, WHOLE, finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE


async def test_a_generation_waits_for_a_worker_to_come_back(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    leg = await decode.received.next(Generate)
    decode.tokens(leg, 0, WHOLE[:2])
    await consumer.received(2)
    await harness.kill("d1")
    (reborn,) = await harness.join("d1", incarnation="d1-2")
    assert await finish_on(reborn, consumer, index=2) == WHOLE


async def test_after_the_first_step_the_prefill_worker_may_go(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request())
    generate = await decode.received.next(Generate)
    leg = await prefill.received.next(Prefill)
    prefill.first_token(leg, 1000)
    decode.tokens(generate, 1, [1001])
    await consumer.received(2)
    await harness.kill("p1")
    decode.tokens(generate, 2, WHOLE[2:], finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE
    assert harness.metric("retries_total") == 0


async def test_a_hole_fails_the_attempt(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    leg = await decode.received.next(Generate)
    decode.tokens(leg, 0, WHOLE[:2])
    decode.tokens(leg, 3, [1003])
    assert await finish_on(decode, consumer, index=2) == WHOLE


async def test_a_first_token_that_never_comes_fails_the_attempt(make_harness) -> None:
    harness = make_harness(first_token_wait_s=0.05)
    decode, _prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request())
    leg = await decode.received.next(Generate)
    decode.tokens(leg, 1, [1001])
    assert await finish_on(decode, consumer) == WHOLE


async def test_what_an_older_attempt_still_sends_is_dropped(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    old = await decode.received.next(Generate)
    decode.tokens(old, 0, WHOLE[:1])
    decode.send(failed(old, decode))
    again = await decode.received.next(Generate)
    decode.tokens(old, 1, [6666])
    decode.send(failed(old, decode))
    decode.tokens(again, 1, WHOLE[1:], finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE
    assert harness.metric("stale_messages_total") == 2


async def test_a_foreign_worker_cannot_speak_for_an_attempt(harness: Harness) -> None:
    workers = {each.info.worker_id: each for each in await harness.join("d1", "d2")}
    consumer = Consumer(harness.dispatcher, request())
    decode = await first_with(workers, Generate)
    other = workers["d2" if decode is workers["d1"] else "d1"]
    leg = await decode.received.next(Generate)
    other.tokens(leg, 0, [6666])
    await until(lambda: harness.metric("stale_messages_total") == 1)
    decode.tokens(leg, 0, WHOLE, finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE


# -- generations that end otherwise ------------------------------------------------------------


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


# -- what remains to tell ----------------------------------------------------------------------


async def test_the_trace_tells_where_time_went(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request(request_id="chat-0"))
    generate = await decode.received.next(Generate)
    leg = await prefill.received.next(Prefill)
    chunks = (ChunkSpan(3000, 5000, 50), ChunkSpan(5000, 9000, 50))
    prefill.first_token(leg, 1000, chunks=chunks)
    await consumer.received(1)
    trace = DecodeTrace(worker_id="d1", received_us=1000, first_step_us=12_500, finished_us=20_000)
    decode.tokens(generate, 1, WHOLE[1:], finish=FinishReason.STOP, trace=trace)
    await consumer.end()
    done = prefill_trace("p1", chunks=chunks, transport="shm", blocks_moved=25, bytes_moved=4096)
    prefill.send(PrefillDone(request_id="chat-0", attempt=leg.attempt, trace=done))
    await until(lambda: harness.metric("blocks_moved_total") == 25)

    found = harness.traces.get("chat")
    assert found is not None
    shown = found.as_json()
    assert shown["request_id"] == "chat-0"
    assert shown["outcome"] == "finished"
    assert shown["placement"]["mode"] == "remote"
    assert (shown["placement"]["decode"], shown["placement"]["prefill"]) == ("d1", "p1")
    assert shown["queue_ms"] == 2.0
    assert shown["prefill_ms"] == 6.0
    assert shown["handoff_ms"] == 3.5
    assert (shown["num_chunks"], shown["blocks_moved"], shown["transport"]) == (2, 25, "shm")
    assert shown["num_output_tokens"] == 6
    assert shown["ttft_ms"] == (shown["first_token_us"] - shown["received_us"]) / 1000
    assert harness.registry.get_sample_value("baton_handoff_seconds_count") == 1


async def test_a_worker_is_charged_with_a_request_until_it_sends_tokens(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request())
    generate = await decode.received.next(Generate)
    leg = await prefill.received.next(Prefill)
    known = [harness.fleet.worker(each) for each in ("d1", "p1")]
    assert [each.num_reservations for each in known] == [1, 1]
    prefill.first_token(leg, 1000)
    await consumer.received(1)
    assert [each.num_reservations for each in known] == [1, 0]
    decode.tokens(generate, 1, [1001])
    await consumer.received(2)
    assert [each.num_reservations for each in known] == [0, 0]
    decode.tokens(generate, 2, WHOLE[2:], finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE


async def test_a_prompt_is_expected_in_the_caches_that_it_goes_to(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    leg = await decode.received.next(Generate)
    blocks = block_hashes(chain_root("weights"), list(range(100)), 4)
    assert harness.index.match("d1", blocks, time.monotonic()) == PrefixMatch(0, 25)
    decode.tokens(leg, 0, WHOLE, finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE


async def test_a_sent_request_counts_as_load_until_stats_must_include_it(
    harness: Harness,
) -> None:
    (decode,) = await harness.join("d1")
    await decode.subscribed()
    consumer = Consumer(harness.dispatcher, request())
    leg = await decode.received.next(Generate)
    worker = harness.fleet.worker("d1")
    assert worker is not None
    assert worker.num_reservations == 1
    for _ in range(2):
        assert worker.num_reservations == 1
        seen = worker.stats
        decode.publish(stats_of(decode))
        await until(lambda seen=seen: worker.stats is not seen)
    assert worker.num_reservations == 0
    decode.tokens(leg, 0, [1], finish=FinishReason.STOP)
    await consumer.end()


def stats_of(worker: FakeWorker, num_running: int = 1) -> WorkerStats:
    return WorkerStats(
        worker_id=worker.info.worker_id,
        incarnation=worker.info.incarnation,
        num_waiting=0,
        num_running=num_running,
        queued_tokens=0,
        blocks_total=1000,
        blocks_used=25,
        blocks_cached=0,
    )


async def test_what_waited_for_a_slow_client_comes_before_what_is_new(harness: Harness) -> None:
    (worker,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    leg = await worker.received.next(Generate)
    consumer.fill()
    for index in range(3):
        worker.tokens(leg, index, [index])
    await until(lambda: harness.traces.get("r").num_output_tokens == 3)
    assert consumer.tokens == []
    consumer.make_room()
    worker.tokens(leg, 3, [3], finish=FinishReason.STOP)
    assert await consumer.end() == [0, 1, 2, 3]


async def test_what_waits_for_a_slow_client_is_not_overtaken(harness: Harness) -> None:
    """Its client has room for one delta at a time, and for the next just when something comes."""
    (worker,) = await harness.join("d1")
    consumer = OneAtATime(harness.dispatcher, request())
    leg = await worker.received.next(Generate)
    consumer.fill()
    for index in range(3):
        worker.tokens(leg, index, [index])
    await until(lambda: harness.traces.get("r").num_output_tokens == 3)
    consumer.make_room()
    await consumer.received(1)
    consumer.make_room()
    last = SequenceTokens(
        request_id="r", attempt=1, index=3, token_ids=[3], finish=FinishReason.STOP
    )
    harness.dispatcher.on_message(harness.fleet.worker("d1"), StepTokens(sequences=[last]))
    while not consumer.task.done():
        consumer.make_room()
        await asyncio.sleep(0)
    assert await consumer.end() == [0, 1, 2, 3]


class OneAtATime(Consumer):
    """Full with every delta, until there is room again."""

    def take(self, delta: TokenDelta) -> bool:
        self.fill()
        return super().take(delta)


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
