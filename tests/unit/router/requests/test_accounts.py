"""What is known of a generation: its trace, the load it is, what waits for its client."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from protocol.hashing import block_hashes, chain_root, seed_of
from protocol.messages import (
    FinishReason,
    Generate,
    Hello,
    Prefill,
    PrefillDone,
    SequenceTokens,
    StepTokens,
)
from protocol.traces import ChunkSpan, DecodeTrace
from router.requests.interface import TokenDelta
from router.requests.trace_json import timing_lookup, trace_json
from router.routing.caches.cache_index import PrefixMatch
from tests.unit.router.fake_worker import SECRET, prefill_trace
from tests.unit.router.router_harness import (
    WHOLE,
    Consumer,
    Harness,
    request,
    stats_of,
    until,
)


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
    shown = trace_json(found, 0)
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


async def test_all_tokens_may_overtake_the_trace_of_the_first(harness: Harness) -> None:
    """What the decode worker waited for is then no queue and no prefill."""
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request(request_id="r"))
    generate = await decode.received.next(Generate)
    leg = await prefill.received.next(Prefill)
    trace = DecodeTrace(
        worker_id="d1", received_us=1000, admitted_us=8000, first_step_us=12_500, finished_us=20_000
    )
    decode.tokens(generate, 0, WHOLE, finish=FinishReason.STOP, cached_tokens=0, trace=trace)
    assert await consumer.end() == WHOLE
    names, timing_of = ("queue_ms", "prefill_ms", "handoff_ms"), timing_lookup(harness.traces)
    early = timing_of("r")
    assert early is not None
    assert [getattr(early, name) for name in names] == [None, None, None]
    assert early.decode_ms is not None
    prefill.first_token(leg, 1000, chunks=(ChunkSpan(3000, 9000, 100),))
    await until(lambda: harness.traces.get("r").attempts[0].prefill is not None)
    late = timing_of("r")
    assert late is not None
    assert [getattr(late, name) for name in names] == [2.0, 6.0, 3.5]


async def test_the_last_delta_finds_the_times_of_the_output(harness: Harness) -> None:
    """The last event of a stream is written while the sink takes it."""
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request(request_id="r", max_tokens=1))
    timing_of, seen = timing_lookup(harness.traces), []
    consumer.take = lambda delta: seen.append(timing_of("r")) or True
    leg = await decode.received.next(Generate)
    decode.tokens(leg, 0, [1000], cached_tokens=0, finish=FinishReason.LENGTH)
    await consumer.end()
    (timing,) = seen
    assert timing.ttft_ms > 0
    assert timing.decode_ms == 0


async def test_the_way_between_workers_is_busy_until_all_blocks_have_arrived(
    harness: Harness,
) -> None:
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request())
    generate = await decode.received.next(Generate)
    leg = await prefill.received.next(Prefill)
    pair = harness.fleet.view().pairs.pair("p1", "d1")
    assert pair.blocks_under_way > 0
    prefill.first_token(leg, 1000)
    done = PrefillDone(
        request_id=leg.request_id, attempt=leg.attempt, trace=prefill_trace("p1", blocks_moved=25)
    )
    decode.send(done)  # which is not its to say
    decode.tokens(generate, 1, [WHOLE[1]])
    await consumer.received(2)
    assert pair.blocks_under_way > 0
    prefill.send(done)
    await until(lambda: harness.metric("blocks_moved_total") == 25)
    assert pair.blocks_under_way == 0
    decode.tokens(generate, 2, WHOLE[2:], finish=FinishReason.STOP)
    await consumer.end()


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
    blocks = block_hashes(chain_root("weights", seed=seed_of(SECRET)), list(range(100)), 4)
    assert harness.index.match("d1", blocks, time.monotonic()) == PrefixMatch(0, 25)
    decode.tokens(leg, 0, WHOLE, finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE


async def test_a_sent_request_counts_as_load_until_stats_count_it(harness: Harness) -> None:
    """Stats come over another connection: any number of them may be older than the request."""
    (decode,) = await harness.join("d1")
    await decode.subscribed()
    consumer = Consumer(harness.dispatcher, request())
    leg = await decode.received.next(Generate)
    worker = harness.fleet.worker("d1")
    assert worker is not None
    assert worker.num_reservations == 1
    assert worker.free_blocks == worker.info.num_blocks - 26
    assert worker.queued_tokens == 100
    session = (await decode.received.next(Hello)).session
    assert session
    for received in ({}, {session: 0}, {"another": 7}, {session: 0}, {session: 1}):
        assert worker.num_reservations == 1
        seen = worker.stats
        decode.publish(msgspec.structs.replace(stats_of(decode), received=received))
        await until(lambda seen=seen: worker.stats is not seen)
    assert worker.num_reservations == 0
    assert worker.stats is not None
    assert worker.free_blocks == worker.info.num_blocks - worker.stats.blocks_used
    assert worker.queued_tokens == worker.stats.queued_tokens
    decode.tokens(leg, 0, [1], finish=FinishReason.STOP)
    await consumer.end()


async def test_a_worker_is_charged_once_for_blocks_that_requests_share(harness: Harness) -> None:
    """Ten requests of one prompt of 25 blocks: the first brings them all, the others compute the
    last one again. Each has one more for its output."""
    (decode,) = await harness.join("d1", num_blocks=100)
    consumers = [
        Consumer(harness.dispatcher, request(request_id=f"r{number}")) for number in range(10)
    ]
    legs = [await decode.received.next(Generate) for _ in consumers]
    known = harness.fleet.worker("d1")
    assert known.free_blocks == 100 - 26 - 9 * 2
    assert known.queued_tokens == 100 + 9 * 4, "each computes the block of its last token"
    for leg in legs:
        decode.tokens(leg, 0, WHOLE, finish=FinishReason.STOP)
    for consumer in consumers:
        assert await consumer.end() == WHOLE


@pytest.mark.parametrize(("name", "counts"), [("d1", True), ("p1", False)])
async def test_blocks_that_requests_wait_for_count_as_claimed_on_decode_workers(
    harness: Harness, name: str, counts: bool
) -> None:
    """A prefill worker's queue counts by its tokens."""
    (worker,) = await harness.join(name)
    known = harness.fleet.worker(name)
    assert known is not None
    await worker.subscribed()
    worker.publish(msgspec.structs.replace(stats_of(worker), blocks_waiting=70))
    await until(lambda: known.stats is not None)
    claimed = 25 + 70 * counts
    assert known.free_blocks == worker.info.num_blocks - claimed
    assert known.load().blocks_claimed == claimed


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
