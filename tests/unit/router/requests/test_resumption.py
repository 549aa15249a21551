"""A router takes up streams that decode workers keep, and generates again what nobody keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from protocol.errors import GenerationFailed
from protocol.messages import Abort, FinishReason, Generate, NotKept, Resume, Resumed
from router.requests.trace_json import trace_json
from tests.unit.router.router_harness import Consumer, Harness, all_sent, request, until


@pytest.fixture
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    made = Harness(resume_wait_s=getattr(request, "param", 60.0))
    yield made
    assert made.dispatcher.inflight == 0
    assert made.traces.num_running == 0
    await made.close()


def resumed(question: Resume, tokens: list[int], **fields: object) -> Resumed:
    name, attempt = question.request_id, question.attempt
    return Resumed(request_id=name, attempt=attempt, token_ids=tokens, **fields)  # type: ignore[arg-type]


def not_kept(question: Resume) -> NotKept:
    return NotKept(request_id=question.request_id, attempt=question.attempt)


IN_ITS_SECOND_LIFE = msgspec.structs.replace(request(), is_resumable=True, life=1)


async def test_it_goes_on_where_it_is_kept(harness: Harness) -> None:
    d1, d2 = await harness.join("d1", "d2")
    consumer = Consumer(harness.dispatcher, IN_ITS_SECOND_LIFE)
    question = await d1.received.next(Resume)
    d1.send(not_kept(question))
    d2.send(resumed(await d2.received.next(Resume), [4, 5, 6]))
    d2.tokens(_leg(question), 3, [7])
    d2.tokens(_leg(question), 4, [8], finish=FinishReason.STOP)
    assert await consumer.end() == [4, 5, 6, 7, 8]
    trace = harness.traces.get("r")
    assert trace is not None
    assert [each["mode"] for each in trace_json(trace, 0)["attempts"]] == ["resume"]
    assert d1.received.count(Generate) + d2.received.count(Generate) == 0


async def test_one_that_has_finished(harness: Harness) -> None:
    (d1,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, IN_ITS_SECOND_LIFE)
    question = await d1.received.next(Resume)
    d1.send(resumed(question, [4, 5], finish=FinishReason.LENGTH))
    assert await consumer.end() == [4, 5]


async def test_nobody_keeps_it(harness: Harness) -> None:
    d1, d2 = await harness.join("d1", "d2")
    consumer = Consumer(harness.dispatcher, IN_ITS_SECOND_LIFE)
    for each in (d1, d2):
        each.send(not_kept(await each.received.next(Resume)))
    await until(lambda: d1.received.count(Generate) + d2.received.count(Generate) == 1)
    chosen = d1 if d1.received.count(Generate) else d2
    leg = await chosen.received.next(Generate)
    assert leg.attempt > 1 << 16, "newer than whatever an earlier router began"
    assert leg.is_resumable
    chosen.tokens(leg, 0, [9], finish=FinishReason.STOP)
    assert await consumer.end() == [9]


@pytest.mark.parametrize("harness", [0.3], indirect=True)
async def test_one_that_answers_too_late_is_told_to_forget_it(harness: Harness) -> None:
    (d1,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, IN_ITS_SECOND_LIFE)
    question = await d1.received.next(Resume)
    leg = await d1.received.next(Generate)
    d1.send(resumed(question, [1, 2]))
    assert (await d1.received.next(Abort)).attempt == question.attempt
    d1.tokens(leg, 0, [9], finish=FinishReason.STOP)
    assert await consumer.end() == [9]


async def test_a_worker_that_dies_over_the_question_does_not_have_it(harness: Harness) -> None:
    d1, d2 = await harness.join("d1", "d2")
    consumer = Consumer(harness.dispatcher, IN_ITS_SECOND_LIFE)
    d2.send(not_kept(await d2.received.next(Resume)))
    await d1.received.next(Resume)
    await harness.kill("d1")
    leg = await d2.received.next(Generate)
    d2.tokens(leg, 0, [9], finish=FinishReason.STOP)
    assert await consumer.end() == [9]


async def test_a_worker_that_is_connected_later_is_asked_too() -> None:
    harness = Harness(resume_wait_s=60.0)
    d1 = harness.make("d1")
    harness.workers["d1"] = d1
    harness.refresh()
    assert not harness.is_usable("d1")
    consumer = Consumer(harness.dispatcher, IN_ITS_SECOND_LIFE)
    d1.send(resumed(await d1.received.next(Resume), [4, 5], finish=FinishReason.LENGTH))
    assert await consumer.end() == [4, 5]
    await harness.close()


async def test_the_same_router_takes_its_own_stream_up(harness: Harness) -> None:
    """The former connection has not ended, as far as the router knows."""
    (d1,) = await harness.join("d1")
    former = Consumer(harness.dispatcher, msgspec.structs.replace(IN_ITS_SECOND_LIFE, life=0))
    leg = await d1.received.next(Generate)
    d1.tokens(leg, 0, [4])
    await former.received(1)
    consumer = Consumer(harness.dispatcher, IN_ITS_SECOND_LIFE)
    question = await d1.received.next(Resume)
    with pytest.raises(GenerationFailed, match="resumed"):
        await former.end()
    assert d1.received.count(Abort) == 0, "the attempt goes on"
    d1.send(resumed(question, [4, 5], finish=FinishReason.STOP))
    assert await consumer.end() == [4, 5]


async def test_an_answer_that_comes_twice_ends_nothing(harness: Harness) -> None:
    (d1,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, IN_ITS_SECOND_LIFE)
    question = await d1.received.next(Resume)
    for _ in range(2):
        d1.send(resumed(question, [4, 5]))
    await until(lambda: harness.metric("stale_messages_total") == 1)
    d1.tokens(_leg(question), 2, [6], finish=FinishReason.STOP)
    assert await consumer.end() == [4, 5, 6]
    await all_sent(harness, d1)
    assert d1.received.count(Abort) == 0


async def test_a_client_that_goes_while_workers_are_asked(harness: Harness) -> None:
    (d1,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, IN_ITS_SECOND_LIFE)
    question = await d1.received.next(Resume)
    await consumer.cancel()
    d1.send(resumed(question, [1]))
    assert (await d1.received.next(Abort)).attempt == question.attempt
    await asyncio.sleep(0)


def _leg(question: Resume) -> Generate:
    """The attempt as the worker's tokens name it."""
    return Generate(
        request_id=question.request_id,
        attempt=question.attempt,
        token_ids=[],
        num_output=0,
        sampling=IN_ITS_SECOND_LIFE.sampling,
        deadline_ms=1,
    )


async def test_only_a_worker_that_was_asked_answers(harness: Harness) -> None:
    d1, p1 = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, IN_ITS_SECOND_LIFE)
    question = await d1.received.next(Resume)
    p1.send(not_kept(question))
    p1.send(resumed(question, [9, 9], finish=FinishReason.STOP))
    await until(lambda: harness.metric("stale_messages_total") == 1)
    d1.send(resumed(question, [4, 5], finish=FinishReason.LENGTH))
    assert await consumer.end() == [4, 5]
