"""Generations over fake workers that go well: on which workers, and in which order."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protocol.events import CacheEvents
from protocol.hashing import (
    ChainStart,
    block_hashes,
    chain_root,
    chain_start,
    more_hashes,
    seed_of,
)
from protocol.messages import Abort, AttemptFailed, FinishReason, Generate, Prefill, Role
from protocol.sampling import TokenLogprobs
from router.fleet.worker import Worker
from router.requests.hash_thread import hash_in_thread
from router.requests.launch import Launcher, legs
from router.requests.prompt_hashes import PromptHashes
from router.routing.sent_requests import SentRequest, SentRequests
from tests.unit.router.fake_worker import SECRET
from tests.unit.router.router_harness import (
    WHOLE,
    Consumer,
    Harness,
    failed,
    finish_on,
    request,
    stats_of,
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
    consumer = Consumer(harness.dispatcher, request(num_tokens=32))
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
            stored=block_hashes(chain_root("weights", seed=seed_of(SECRET)), list(range(400)), 4),
            removed=[],
        )
    )
    await until(lambda: harness.index.num_blocks(holder.info.worker_id) == 100)
    second = Consumer(harness.dispatcher, request(num_tokens=420, request_id="turn-2"))
    leg = await holder.received.next(Generate)
    assert leg.prefill is None
    holder.tokens(leg, 0, [7], finish=FinishReason.STOP)
    assert await second.end() == [7]


@pytest.mark.parametrize(("placement", "shares"), [("cache", [2, 0]), ("load", [1, 1])])
async def test_placement_may_leave_caches_out(placement: str, shares: list[int]) -> None:
    harness = Harness(placement=placement)
    workers = await harness.join("d1", "d2")
    consumers: list[Consumer] = []
    for name in ("turn-1", "turn-2"):
        consumers.append(Consumer(harness.dispatcher, request(num_tokens=400, request_id=name)))
        await until(
            lambda: sum(each.received.count(Generate) for each in workers) == len(consumers)
        )
    assert sorted((each.received.count(Generate) for each in workers), reverse=True) == shares
    for each in consumers:
        await each.cancel()
    await harness.close()


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


async def test_the_trace_tells_when_the_first_and_the_last_token_came(harness: Harness) -> None:
    ticks = itertools.count(1000)
    harness.traces.wall_us = lambda: next(ticks)
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    leg = await decode.received.next(Generate)
    decode.tokens(leg, 0, [1, 2])
    await consumer.received(2)
    (trace,) = harness.traces.all()
    first = trace.first_token_us
    assert (trace.last_token_us, trace.num_output_tokens) == (first, 2)
    decode.tokens(leg, 2, [3], finish=FinishReason.LENGTH)
    await consumer.end()
    assert first == trace.first_token_us < trace.last_token_us <= trace.finished_us
    assert trace.num_output_tokens == 3


async def test_hashes_of_one_root_are_not_taken_for_those_of_another() -> None:
    """Two sequences of a prompt wait while the fleet's model, and so the root, changes."""
    shared, tokens = PromptHashes(), list(range(64))
    starts = [ChainStart(chain_root(each)) for each in "ab"]
    await asyncio.gather(*(hash_in_thread(shared, tokens, each, 4) for each in starts))
    for each in reversed(starts):  # the last one that was prepared first
        assert shared.of(tokens, each, 4) == block_hashes(each.own, tokens, 4)


async def test_a_long_prompt_is_hashed_once_and_off_the_loop(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three choices of it, and a second attempt that hashes only what was generated since."""
    monkeypatch.setattr("router.requests.launch.LONG_PROMPT_TOKENS", 64)
    monkeypatch.setattr("router.requests.hash_thread.HASHED_AT_ONCE", 32)
    (worker,) = await harness.join("d1")
    loop_thread = threading.get_ident()
    on_loop: list[int] = []
    elsewhere: list[int] = []

    def counted(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
        here = on_loop if threading.get_ident() == loop_thread else elsewhere
        here.append(len(tokens))
        return block_hashes(root, tokens, block_size)

    monkeypatch.setattr("router.requests.hash_thread.block_hashes", counted)
    monkeypatch.setattr("protocol.hashing.block_hashes", counted)
    shared, num_tokens = PromptHashes(), 400
    asked = [
        msgspec.structs.replace(request(num_tokens, f"r{number}", max_tokens=9), hashes=shared)
        for number in range(3)
    ]
    consumers = [Consumer(harness.dispatcher, each) for each in asked]
    legs = [await worker.received.next(Generate) for _ in consumers]
    assert (sum(elsewhere), on_loop) == (num_tokens, [])
    root = chain_root("weights", seed=seed_of(SECRET))
    known = harness.index.match("d1", block_hashes(root, asked[0].token_ids, 4), time.monotonic())
    assert known.expected == num_tokens // 4
    worker.tokens(legs[0], 0, [1, 2, 3, 4, 5])
    await consumers[0].received(5)
    worker.send(failed(legs[0], worker))
    again = await worker.received.next(Generate)
    assert (again.num_output, sum(elsewhere), on_loop) == (5, num_tokens, [5])
    for consumer in consumers:
        await consumer.cancel()


@pytest.mark.parametrize("wait_s", [0.0, 0.005])
async def test_long_prompts_that_wait_for_their_hashes_start_one_in_a_turn(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    """All sequences of a prompt wake up when its hashes are there; starting one takes longer than
    the router waits for its turn among routers."""
    monkeypatch.setattr("router.requests.launch.LONG_PROMPT_TOKENS", 64)
    monkeypatch.setattr(Launcher, "wait_s", lambda launcher, generation: wait_s)
    await harness.join("d1")
    turn, started = 0, Counter[int]()

    def noted(*args: Any) -> list[tuple[Worker, Generate | Prefill]]:
        started[turn] += 1
        time.sleep(4 * wait_s)
        return legs(*args)

    monkeypatch.setattr("router.requests.dispatcher.legs", noted)
    shared = PromptHashes()
    asked = [
        msgspec.structs.replace(request(400, f"r{number}"), hashes=shared) for number in range(6)
    ]
    consumers = [Consumer(harness.dispatcher, each) for each in asked]
    while started.total() < len(asked):
        await asyncio.sleep(0)
        turn += 1
    assert max(started.values()) == 1
    for consumer in consumers:
        await consumer.cancel()


async def test_both_legs_hear_how_much_of_a_prompt_everybody_shares_and_where_it_stays(
    harness: Harness,
) -> None:
    decode, prefill = await harness.join("d1", "p1")
    fields = {"cache_salt": "a", "shared_tokens": 10, "stays_in_pool": True}
    asked = msgspec.structs.replace(request(), **fields)
    consumer = Consumer(harness.dispatcher, asked)
    legs = await decode.received.next(Generate), await prefill.received.next(Prefill)
    assert [{name: getattr(each, name) for name in fields} for each in legs] == [fields] * 2
    seed = seed_of(SECRET)
    for salt, num_blocks in (("a", 25), ("b", 2)):
        start = chain_start("weights", salt, seed, 10, 4)
        hashes = more_hashes([], start, asked.token_ids, 4)
        assert harness.index.match("d1", hashes, time.monotonic()).expected == num_blocks
    await consumer.cancel()


async def test_sequences_of_one_prompt_hash_its_blocks_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.join("d1")
    hashed: list[int] = []

    def counted(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
        hashed.append(len(tokens))
        return block_hashes(root, tokens, block_size)

    monkeypatch.setattr("protocol.hashing.block_hashes", counted)
    shared = PromptHashes()
    asked = [
        msgspec.structs.replace(request(request_id=f"r{number}"), hashes=shared)
        for number in range(3)
    ]
    consumers = [Consumer(harness.dispatcher, each) for each in asked]
    await until(lambda: harness.dispatcher.inflight == 3)
    assert hashed == [len(asked[0].token_ids)]
    for consumer in consumers:
        consumer.task.cancel()
    await asyncio.gather(*(each.task for each in consumers), return_exceptions=True)


async def test_a_router_waits_for_its_turn_and_sees_what_others_have_sent(
    harness: Harness,
) -> None:
    workers = await harness.join("d1", "p1", "p2")
    view, (_, *prefill) = harness.fleet.view(), workers
    for worker, queued in zip(workers, (0, 0, 50), strict=True):
        await worker.subscribed()
        load = {"step_per_token_us": 1e4, "queued_tokens": queued}
        worker.publish(msgspec.structs.replace(stats_of(worker), **load))
    await until(
        lambda: (found := view.typical(Role.DECODE)) is not None and found.per_token_us == 1e4
    )
    view.stagger.rank = 200
    view.reserve_for_others([SentRequests("gone", "other", 1, 1, [SentRequest(1, 10**6, 1)])])
    consumer = Consumer(harness.dispatcher, request(request_id="r1"))
    while harness.dispatcher.inflight < 1:
        await asyncio.sleep(0)
    more = [SentRequest(number, 100, 25) for number in (1, 2)]
    view.reserve_for_others([SentRequests("p1", "other", 1, 2, more)])
    leg = await prefill[1].received.next(Prefill)
    assert leg.request_id == "r1"
    assert prefill[0].received.count(Prefill) == 0
    await consumer.cancel()
    prefill[0].publish(msgspec.structs.replace(stats_of(prefill[0]), received={"other": 2}))
    await until(
        lambda: all(each.num_reservations == 0 for each in harness.fleet.ready(Role.PREFILL))
    )
