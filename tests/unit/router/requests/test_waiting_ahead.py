"""A request is refused at once if the prompts before it are sure to outlast its deadline."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from protocol.errors import DeadlineUnreachable, TargetUnreachable
from protocol.events import WorkerStats
from protocol.messages import FinishReason, Generate, Prefill
from router.requests.trace_json import receipt_json
from router.routing.placement import Targets
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.router_harness import (
    Consumer,
    Harness,
    failed,
    request,
    stats_of,
    until,
)

PROMPT = 1000
TOKEN_US = 100_000.0
WAIT_S = 100
"""A prompt takes so long in `PROVEN`'s model, so that the tests' own time does not matter."""
PROVEN = {
    "prefill_tokens": PROMPT,
    "steps": 10_000,
    "step_us": 10_000_000,
    "step_error_us": 5_000_000,
}
HOPELESS_MS = WAIT_S * 1000 * 4 // 10
"""Less than half of the wait."""
DOUBTFUL_MS = WAIT_S * 1000 * 6 // 10


class Queue:
    """A worker with one prompt in front of it, and what it reports of itself."""

    def __init__(
        self, harness: Harness, worker: FakeWorker, first: Consumer, leg: Generate | Prefill
    ) -> None:
        self.harness = harness
        self.worker = worker
        self.first = first
        self.leg = leg

    async def report(self, **fields) -> None:
        known: WorkerStats = msgspec.structs.replace(
            stats_of(self.worker), step_per_token_us=TOKEN_US, counters=PROVEN
        )
        told = msgspec.structs.replace(known, **fields)
        self.worker.publish(told)
        await until(lambda: self._worker.stats == told)

    async def sends_next(self, **fields) -> bool:
        """Whether the next request goes to the worker."""
        consumer = Consumer(self.harness.dispatcher, next_request(**fields))
        sent = await self.worker.received.next(Generate)
        await consumer.cancel()
        return sent.request_id == "next"

    @property
    def session(self) -> str:
        return self._worker.link.session

    @property
    def _worker(self):
        found = self.harness.fleet.worker(self.worker.info.worker_id)
        assert found is not None
        return found


@pytest.fixture
async def queue(harness: Harness) -> AsyncIterator[Queue]:
    (decode,) = await harness.join("d1")
    await decode.subscribed()
    first = Consumer(harness.dispatcher, request(PROMPT, "first", WAIT_S * 10_000))
    leg = await decode.received.next(Generate)
    yield Queue(harness, decode, first, leg)
    await first.cancel()


def next_request(deadline_ms: int = HOPELESS_MS, **fields):
    """Another prompt: it does not find the first one's blocks."""
    made = request(PROMPT, "next", deadline_ms)
    return msgspec.structs.replace(made, token_ids=made.token_ids[::-1], **fields)


async def test_a_request_that_cannot_be_in_time_is_refused_at_once(queue: Queue) -> None:
    await queue.report(step_per_token_us=TOKEN_US / 2)
    consumer = Consumer(queue.harness.dispatcher, next_request(HOPELESS_MS // 2))
    with pytest.raises(DeadlineUnreachable, match=r"take about 50\.0 s") as caught:
        await consumer.end()
    assert caught.value.status == 503
    assert 30 <= caught.value.retry_after_s <= 50, "20 s of the 50 were left at first"
    trace = queue.harness.traces.get("next")
    assert trace is not None
    receipt = receipt_json(trace, 0)
    assert (receipt["outcome"], receipt["error"]) == ("failed", "deadline_unreachable")
    assert queue.harness.metric("refusals_total", reason="deadline_unreachable") == 1
    assert queue.harness.metric("attempts_total", mode="local") == 1
    assert queue.harness.dispatcher.inflight == 1
    worker = queue.harness.fleet.worker("d1")
    assert worker is not None
    assert (worker.num_reservations, worker.queued_tokens) == (1, PROMPT)


async def test_the_queue_of_the_prefill_worker_counts(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    await prefill.subscribed()
    first = Consumer(harness.dispatcher, request(PROMPT, "first", WAIT_S * 10_000))
    leg = await prefill.received.next(Prefill)
    await decode.received.next(Generate)
    await Queue(harness, prefill, first, leg).report()
    with pytest.raises(DeadlineUnreachable):
        await Consumer(harness.dispatcher, next_request()).end()
    assert decode.received.count(Generate) == prefill.received.count(Prefill) == 0
    await first.cancel()


async def test_a_request_that_may_be_in_time_is_sent(queue: Queue) -> None:
    await queue.report()
    assert await queue.sends_next(deadline_ms=DOUBTFUL_MS)


async def test_prompts_of_another_share_may_come_later(queue: Queue) -> None:
    await queue.report()
    assert await queue.sends_next(share="another")


async def test_prompts_of_a_lower_priority_come_later(queue: Queue) -> None:
    await queue.report()
    assert await queue.sends_next(priority=1)


async def test_prompts_of_a_higher_priority_come_first(queue: Queue) -> None:
    await queue.report()
    with pytest.raises(DeadlineUnreachable):
        await Consumer(queue.harness.dispatcher, next_request(priority=-1)).end()


@pytest.mark.parametrize(
    ("fields", "is_sent"),
    [
        ({"ttft_target_ms": 1900.0 * WAIT_S}, False),
        ({"ttft_target_ms": 1500.0 * WAIT_S, "priority": 1}, True),
        ({"ttft_target_ms": 2600.0 * WAIT_S}, True),
        ({"tpot_target_ms": 1.0}, True),
    ],
    ids=["late", "more urgent", "in time", "no first target"],
)
async def test_a_target_that_the_load_makes_it_miss(queue: Queue, fields, is_sent: bool) -> None:
    """Its own prompt takes as long as the one before it. The least urgent requests are refused
    first: more prompts come before them."""
    await queue.report(num_running=0)
    if is_sent:
        assert await queue.sends_next(deadline_ms=WAIT_S * 2000, **fields)
        return
    consumer = Consumer(queue.harness.dispatcher, next_request(WAIT_S * 2000, **fields))
    with pytest.raises(
        TargetUnreachable, match=r"about 200\.0 s, later than its target of 190\.0 s"
    ) as caught:
        await consumer.end()
    assert (caught.value.status, caught.value.code) == (503, "target_unreachable")
    assert caught.value.retry_after_s == 48
    assert queue.harness.metric("refusals_total", reason="target_unreachable") == 1


async def test_more_urgent_requests_are_expected_to_come(queue: Queue) -> None:
    """All that was sent lately is more urgent, so the wait may take twice as long."""
    await queue.report(num_running=0)
    fields = {"ttft_target_ms": 2700.0 * WAIT_S, "priority": -1}
    consumer = Consumer(queue.harness.dispatcher, next_request(WAIT_S * 5000, **fields))
    with pytest.raises(TargetUnreachable, match=r"400\.0 s, later than its target of 270\.0 s"):
        await consumer.end()
    assert await queue.sends_next(deadline_ms=WAIT_S * 5000, **fields | {"priority": 0})


async def test_the_routers_own_targets_refuse_nothing(queue: Queue) -> None:
    queue.harness.dispatcher.use_targets(lambda: Targets(1.0, 1.0))
    await queue.report()
    assert await queue.sends_next(deadline_ms=WAIT_S * 2000)


async def test_a_prompt_that_has_its_first_token_is_computed(queue: Queue) -> None:
    await queue.report(queued_tokens=PROMPT)  # of another router
    queue.worker.tokens(queue.leg, 0, [7])
    await queue.first.received(1)
    assert await queue.sends_next()


async def test_what_the_worker_has_computed_waits_no_more(queue: Queue) -> None:
    await queue.report(queued_tokens=PROMPT // 10, received={queue.session: 1})
    assert await queue.sends_next()


@pytest.mark.parametrize(
    "counters",
    [
        {},
        PROVEN | {"prefill_tokens": PROMPT - 1},
        PROVEN | {"step_us": 0, "step_error_us": 0},
        PROVEN | {"step_error_us": 5_000_001},
    ],
    ids=["no steps", "few prompts", "none measured", "far off"],
)
async def test_a_model_that_has_not_proved_itself_refuses_nothing(
    queue: Queue, counters: dict[str, int]
) -> None:
    await queue.report(counters=counters)
    assert await queue.sends_next()


async def test_errors_that_cancel_out_leave_the_model_proven(queue: Queue) -> None:
    """Steps on a disturbed machine are far off one by one, but not in all."""
    noisy = PROVEN | {"step_error_us": 9_000_000}
    await queue.report(counters=noisy | {"predicted_step_us": 11_000_001})
    assert await queue.sends_next()
    await queue.report(counters=noisy | {"predicted_step_us": 11_000_000})
    with pytest.raises(DeadlineUnreachable):
        await Consumer(queue.harness.dispatcher, next_request()).end()


async def test_without_a_report_nothing_is_refused(queue: Queue) -> None:
    assert await queue.sends_next()


async def test_an_attempt_after_the_first_is_not_refused(queue: Queue) -> None:
    """It was accepted: it ends at its deadline."""
    await queue.report()
    consumer = Consumer(queue.harness.dispatcher, next_request(deadline_ms=DOUBTFUL_MS))
    leg = await queue.worker.received.next(Generate)
    await queue.report(step_per_token_us=10 * TOKEN_US)
    queue.worker.send(failed(leg, queue.worker))
    again = await queue.worker.received.next(Generate)
    assert (again.request_id, again.attempt) == ("next", leg.attempt + 1)
    queue.worker.tokens(again, 0, [7], finish=FinishReason.STOP)
    assert await consumer.end() == [7]
