"""Generations over fake workers that go well: on which workers, and in which order."""

from __future__ import annotations

from protocol.events import CacheEvents
from protocol.hashing import block_hashes, chain_root
from protocol.messages import Abort, AttemptFailed, FinishReason, Generate, Prefill
from protocol.sampling import TokenLogprobs
from tests.unit.router.router_harness import (
    WHOLE,
    Consumer,
    Harness,
    finish_on,
    request,
    until,
)


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
