"""Attempts that fail: where the next one runs, and that no token is lost or told twice."""

from __future__ import annotations

import pytest

from protocol.errors import Overloaded
from protocol.events import CacheEvents
from protocol.hashing import block_hashes, chain_root, seed_of
from protocol.message_base import Message
from protocol.messages import Abort, FinishReason, Generate, Prefill
from router.fleet.worker import Link
from router.routing.candidates import RETRY_STUCK_S
from tests.unit.router.fake_worker import SECRET, FakeWorker
from tests.unit.router.router_harness import (
    TOLD,
    WHOLE,
    Consumer,
    Harness,
    failed,
    finish_on,
    first_with,
    request,
    stats_of,
    until,
)


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
    stored = block_hashes(chain_root("weights", seed=seed_of(SECRET)), list(range(100)), 4)
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


async def test_a_decode_worker_that_cannot_be_reached_is_to_blame_itself(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the prefill worker, which has done nothing."""
    await harness.join("d1", "d2", "p1")
    unreachable: list[str] = []

    def cut(link: Link, name: str) -> None:
        send = link.send

        def first_fails(message: Message) -> bool:
            if isinstance(message, Generate) and not unreachable:
                unreachable.append(name)
                return False
            return send(message)

        monkeypatch.setattr(link, "send", first_fails)

    for name in ("d1", "d2"):
        known = harness.fleet.worker(name)
        assert known is not None
        cut(known.link, name)
    consumer = Consumer(harness.dispatcher, request())
    await until(lambda: bool(unreachable))
    other = harness.workers["d2" if unreachable == ["d1"] else "d1"]
    leg = await other.received.next(Generate)
    assert leg.prefill is not None
    other.tokens(leg, 0, WHOLE, finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE


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
    assert (await decode.received.next(Abort)).attempt == leg.attempt
    assert await finish_on(decode, consumer, index=2) == WHOLE


async def test_a_first_token_that_never_comes_fails_the_attempt(make_harness) -> None:
    harness = make_harness(first_token_wait_s=0.05)
    decode, prefill = await harness.join("d1", "p1")
    consumer = Consumer(harness.dispatcher, request())
    leg = await decode.received.next(Generate)
    decode.tokens(leg, 1, [1001])
    assert (await prefill.received.next(Abort)).attempt == leg.attempt
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


# -- workers without room -----------------------------------------------------------------------


async def test_a_request_that_is_given_back_goes_to_a_worker_with_room(harness: Harness) -> None:
    workers = {each.info.worker_id: each for each in await harness.join("d1", "d2", "p1")}
    consumer = Consumer(harness.dispatcher, request())
    full = await first_with(workers, Generate)
    leg = await full.received.next(Generate)
    full.send(failed(leg, full, lacks_room=True))
    other = workers["d2" if full is workers["d1"] else "d1"]
    again = await other.received.next(Generate)
    assert again.prefill is not None, "its prefill worker is not to blame"
    other.tokens(again, 0, WHOLE, finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE


async def test_if_no_worker_has_room_the_caller_may_come_again(harness: Harness) -> None:
    (only,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request())
    leg = await only.received.next(Generate)
    known = harness.fleet.worker("d1")
    assert known is not None
    await only.subscribed()
    only.publish(stats_of(only, blocks_stuck=999))
    await until(lambda: known.stats is not None)
    only.send(failed(leg, only, lacks_room=True))
    with pytest.raises(Overloaded, match="needs 25 KV blocks") as caught:
        await consumer.end()
    assert caught.value.retry_after_s >= 1
    with pytest.raises(Overloaded, match="needs 25 KV blocks") as caught:
        await Consumer(harness.dispatcher, request()).end()
    assert caught.value.retry_after_s == RETRY_STUCK_S


async def test_a_silent_prefill_worker_gets_no_prompts_even_if_it_is_the_only_one(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, _ = await harness.join("d1", "p1")
    known = harness.fleet.worker("p1")
    assert known is not None
    monkeypatch.setattr(known.link, "is_responsive", lambda now: False)
    harness.fleet.on_readiness()  # so that the links are looked at before it could be silent
    consumer = Consumer(harness.dispatcher, request())
    leg = await decode.received.next(Generate)
    assert leg.prefill is None
    decode.tokens(leg, 0, WHOLE, finish=FinishReason.STOP)
    assert await consumer.end() == WHOLE


async def test_a_long_request_waits_for_a_worker_that_is_large_enough(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker dies, and only a small one is ready."""
    waits, wait_for_decode = [], harness.fleet.wait_for_decode

    async def noted(min_context: int = 0) -> None:
        waits.append(min_context)
        await wait_for_decode(min_context)

    monkeypatch.setattr(harness.fleet, "wait_for_decode", noted)
    await harness.join("d1", max_context=160)
    (large,) = await harness.join("d2")
    consumer = Consumer(harness.dispatcher, request(300))
    leg = await large.received.next(Generate)
    large.tokens(leg, 0, WHOLE[:2])
    await consumer.received(2)
    await harness.kill("d2")
    await until(lambda: waits == [400])
    (back,) = await harness.join("d3")
    assert await finish_on(back, consumer, index=2) == WHOLE
