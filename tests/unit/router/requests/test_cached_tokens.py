"""A request's cached tokens: its prompt minus what the attempt with the first token computed."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import msgspec
import pytest

from protocol.messages import AttemptFailed, FinishReason, Generate, Prefill, Resume, Resumed
from protocol.traces import ChunkSpan, DecodeTrace
from router.requests.trace_json import receipt_json
from tests.effort import times
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.router_harness import (
    WHOLE,
    Consumer,
    Harness,
    failed,
    first_with,
    request,
)

NUM_PROMPT = 100
BLOCK = 16


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness(max_attempts=9)
    yield made
    await made.close()


class Story:
    """Attempts at one request, each of which computes what its workers lack and may fail.

    A worker's figures are what it would say: `cached` is what the attempt with the first token had
    on the worker that computed the prompt, `before` what failed attempts computed in vain.
    """

    def __init__(self, harness: Harness, seed: int) -> None:
        self.harness = harness
        self.rng = random.Random(seed)
        self.consumer = Consumer(harness.dispatcher, request(NUM_PROMPT))
        self.num_tokens = 0
        self.cached: int | None = None
        self.before = 0

    async def attempt(self, is_last: bool) -> None:
        decode = await first_with(self.harness.workers, Generate)
        leg = await decode.received.next(Generate)
        assert leg.cached_tokens == (self.cached or 0) if leg.num_output else leg.cached_tokens == 0
        held = self.rng.randrange(0, NUM_PROMPT, BLOCK)
        computed = NUM_PROMPT - held
        if self.num_tokens == 0 and not is_last and self.rng.random() < 0.5:
            self.before += computed
            await self._fail(leg, decode, computed)
            return
        if self.cached is None:
            self.cached = held
        count = len(WHOLE) - self.num_tokens if is_last else self.rng.randint(1, 2)
        await self._serve(leg, decode, held, min(count, len(WHOLE) - 1) if not is_last else count)
        if is_last:
            await self.consumer.end()
        else:
            await self.consumer.received(self.num_tokens)
            await self._fail(leg, decode, computed)

    async def _serve(self, leg: Generate, decode: FakeWorker, held: int, count: int) -> None:
        first, self.num_tokens = self.num_tokens, min(len(WHOLE), self.num_tokens + count)
        is_done = self.num_tokens == len(WHOLE)
        tokens = WHOLE[first : self.num_tokens]
        chunks = (ChunkSpan(1000, 2000, NUM_PROMPT - held),)
        told = self.cached if leg.num_output else held
        own = self.rng.randrange(0, NUM_PROMPT, BLOCK)  # a decode worker's, of a remote prompt
        if leg.prefill is not None:
            prefill = self.harness.workers[leg.prefill.worker_id]
            await prefill.received.next(Prefill)
            prefill.first_token(leg, tokens[0], cached_tokens=held, chunks=chunks)
        trace = DecodeTrace(
            worker_id=decode.info.worker_id,
            received_us=1000,
            cached_tokens=held if leg.prefill is None else own,
            chunks=chunks if leg.prefill is None else (),
        )
        decode.tokens(
            leg,
            first,
            tokens,
            cached_tokens=told,
            finish=FinishReason.STOP if is_done else None,
            trace=trace if is_done else None,
        )

    async def _fail(self, leg: Generate, decode: FakeWorker, computed: int) -> None:
        message: AttemptFailed = failed(leg, decode, lacks_room=False)
        decode.send(msgspec.structs.replace(message, computed_tokens=computed))


@pytest.mark.parametrize("has_prefill", [False, True])
@pytest.mark.parametrize("seed", range(times(3, 40)))
async def test_it_is_the_prompt_minus_what_the_attempt_with_the_first_token_computed(
    harness: Harness, seed: int, has_prefill: bool
) -> None:
    await harness.join("d1", "d2", *(["p1", "p2"] if has_prefill else []))
    story = Story(harness, seed)
    for _ in range(story.rng.randint(0, 2)):
        if story.num_tokens < len(WHOLE) - 2:
            await story.attempt(is_last=False)
    await story.attempt(is_last=True)
    assert story.consumer.tokens == WHOLE
    assert {each.cached_tokens for each in story.consumer.deltas} == {story.cached}
    trace = harness.traces.get("r")
    assert trace is not None
    receipt = receipt_json(trace, 0)
    assert receipt["num_cached_tokens"] == story.cached
    assert receipt["num_computed_before"] == story.before
    harness.traces.report_ended()
    counted = {
        source: harness.registry.get_sample_value(
            "baton_prompt_tokens_by_source_total", {"source": source}
        )
        for source in ("cached", "computed", "computed_before")
    }
    assert counted == {
        "cached": story.cached,
        "computed": NUM_PROMPT - story.cached,
        "computed_before": story.before,
    }


async def test_a_resumed_stream_counts_what_its_first_token_had(harness: Harness) -> None:
    """So does an attempt that goes on after the worker which kept the stream has failed."""
    (d1,) = await harness.join("d1")
    again = msgspec.structs.replace(request(NUM_PROMPT), is_resumable=True, life=1)
    consumer = Consumer(harness.dispatcher, again)
    question = await d1.received.next(Resume)
    kept = Resumed(request_id="r", attempt=question.attempt, token_ids=WHOLE[:2], cached_tokens=48)
    d1.send(kept)
    await consumer.received(2)
    d1.send(failed(question, d1))
    leg = await d1.received.next(Generate)
    assert leg.cached_tokens == 48
    d1.tokens(leg, 2, WHOLE[2:], cached_tokens=48, finish=FinishReason.STOP)
    await consumer.end()
    assert {each.cached_tokens for each in consumer.deltas} == {48}
