"""What the doctor is shown of a fleet, and `/cache`, from requests on fake workers."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest

from console.doctor.doctor import examine
from console.doctor.observation import MIN_REQUESTS, Observation, RequestFacts
from console.telemetry.examination.diagnosis import Diagnosis
from console.telemetry.examination.observer import MAX_PER_S, FleetObserver
from console.telemetry.examination.request_facts import request_facts
from protocol.events import CacheEvents
from protocol.messages import FinishReason, Generate
from protocol.registration import WorkerState
from protocol.traces import ChunkSpan, DecodeTrace, StepSpan, pack_steps
from router.requests.trace import RequestTrace
from router.requests.trace_json import row_json, trace_json
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.router_harness import Consumer, Harness, request, stats_of, until


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness(trace_history=1000)
    yield made
    await made.close()


@pytest.fixture
def observer(harness: Harness) -> FleetObserver:
    return FleetObserver(
        harness.fleet,
        harness.traces,
        harness.report,
        harness.cache,
        random.Random(1),
    )


async def serve(harness: Harness, worker: FakeWorker, name: str, trace: DecodeTrace | None) -> None:
    consumer = Consumer(harness.dispatcher, request(100, request_id=name))
    leg = await worker.received.next(Generate)
    cached = None if trace is None else trace.cached_tokens
    done = FinishReason.STOP
    worker.tokens(leg, 0, [1, 2, 3], finish=done, trace=trace, cached_tokens=cached)
    await consumer.end()


def decode_trace(cached: int = 48, spans: tuple[StepSpan, ...] = ()) -> DecodeTrace:
    return DecodeTrace(
        worker_id="d1", received_us=1, cached_tokens=cached, chunks=(ChunkSpan(1, 2, 52),),
        steps_since_us=0, steps=pack_steps(0, spans),
    )  # fmt: skip


async def test_requests_are_sampled_and_workers_measured(
    harness: Harness, observer: FleetObserver
) -> None:
    (worker,) = await harness.join("d1", max_batch_size=8)
    for number in range(MAX_PER_S + 3):
        await serve(harness, worker, f"r{number}", decode_trace())
    await worker.subscribed()
    first = msgspec.structs.replace(
        stats_of(worker, num_running=3), step_fixed_us=5.0, num_waiting=2,
        counters={"steps": 10, "step_us": 1000, "prefill_tokens": 0, "decode_tokens": 5},
    )  # fmt: skip
    worker.publish(first)
    await until(lambda: harness.fleet.worker("d1").stats is not None)
    await observer.sample()
    grown = {"steps": 30, "step_us": 41_000, "prefill_tokens": 20, "decode_tokens": 85}
    worker.publish(msgspec.structs.replace(first, counters=grown | {"preemptions": 1}))
    await until(lambda: harness.fleet.worker("d1").stats.counters["steps"] == 30)
    await observer.sample()
    seen = observer.observe()
    assert len(seen.requests) == MAX_PER_S
    assert {each.cached_tokens for each in seen.requests} == {48}
    (facts,) = seen.workers
    assert (facts.num_waiting, facts.num_running, facts.max_batch_size) == (2, 3, 8)
    assert (facts.num_steps, facts.step_ms, facts.step_tokens) == (20, 2.0, 5.0)
    assert (facts.preemptions, facts.hit_rate) == (1, 0.48)
    assert facts.step_model is not None
    assert seen.settings == {}
    assert json.loads(msgspec.json.encode(seen))


async def test_steps_of_a_request_are_summed_up(harness: Harness) -> None:
    (worker,) = await harness.join("d1")
    durations = [10] * 20 + [30] * 20
    durations[15], spans, end = 900, [], 0
    for index, ms in enumerate(durations):
        tokens = 64 if index == 15 else 0
        spans.append(StepSpan(end, end + ms * 1000, 4, 1, tokens))
        end += ms * 1000
    await serve(harness, worker, "r", decode_trace(spans=tuple(spans)))
    (trace,) = harness.traces.all()
    facts = request_facts(trace, harness.traces.wall_us())
    assert (facts.num_steps, facts.num_long_steps, facts.num_long_shared_steps) == (40, 1, 1)
    assert facts.long_step_ms == 900.0
    assert (facts.early_step_ms, facts.late_step_ms) == (10.0, 30.0)
    assert facts.ttft_ms == pytest.approx(sum(facts.first.values()))


async def test_facts_of_requests_are_worked_out_off_the_loop(
    harness: Harness, observer: FleetObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output may have thousands of steps."""
    threads: list[int] = []

    def noted(trace: RequestTrace, now_us: int) -> RequestFacts:
        threads.append(threading.get_ident())
        return request_facts(trace, now_us)

    monkeypatch.setattr("console.telemetry.examination.observer.request_facts", noted)
    (worker,) = await harness.join("d1")
    await serve(harness, worker, "r", decode_trace())
    await observer.sample()
    assert len(observer.observe().requests) == 1
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_a_row_of_the_list_of_requests_needs_no_steps(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list has many rows, and is made on the event loop."""
    (worker,) = await harness.join("d1")
    spans = (StepSpan(3, 5, 1, 1, 0), StepSpan(5, 9, 1, 1, 0))
    await serve(harness, worker, "r", decode_trace(spans=spans))
    (trace,) = harness.traces.all()
    trace.last_token_us += 10
    now_us = harness.traces.wall_us()
    assert {each["part"] for each in trace_json(trace, now_us)["stages"]} > {"first_token"}
    rows = [each for each in trace_json(trace, now_us)["stages"] if each["part"] == "first_token"]
    monkeypatch.delattr("protocol.traces.unpack_steps")
    row = row_json(trace, now_us)
    assert [tuple(each) for each in row["stages"]] == [(e["stage"], e["ms"]) for e in rows]


async def test_a_worker_that_is_down_is_seen_with_its_losses(
    harness: Harness, observer: FleetObserver
) -> None:
    await harness.join("d1", "d2")
    for _ in range(2):
        await harness.kill("d2")
        await harness.join("d2")
    await harness.kill("d2")
    seen = {each.worker_id: each for each in observer.observe().workers}
    assert (seen["d2"].state, seen["d2"].losses) == ("lost", 3)
    assert (seen["d1"].state, seen["d1"].losses) == ("ready", 0)
    loading = harness.make("d2", incarnation="d2-9", state=WorkerState.LOADING)
    harness.workers["d2"] = loading
    harness.refresh()
    seen = {each.worker_id: each for each in observer.observe().workers}
    assert (seen["d2"].state, seen["d2"].losses) == ("loading", 3)


async def test_the_diagnosis_says_what_it_lacks_and_then_what_it_found(
    harness: Harness, observer: FleetObserver
) -> None:
    diagnosis = Diagnosis(observer, harness.report)
    assert diagnosis.as_json()["is_conclusive"] is False
    assert diagnosis.observation_json() is None
    (worker,) = await harness.join("d1")
    for number in range(MIN_REQUESTS):
        await serve(harness, worker, f"r{number}", decode_trace())
        if number % MAX_PER_S == MAX_PER_S - 1:
            await observer.sample()
    await diagnosis.examine()
    shown = diagnosis.as_json()
    assert shown["is_conclusive"] is True
    assert shown["num_requests"] == MIN_REQUESTS
    told = {each["rule"] for each in (*shown["findings"], *shown["passed"])}
    assert told >= {"store", "decode_slow", "cache_thrash", "faults"}, "facts and speed"
    await diagnosis.check_facts()
    again = diagnosis.as_json()
    assert {each["rule"] for each in (*again["findings"], *again["passed"])} == told
    assert shown["checked_us"] > 0
    body = json.dumps(diagnosis.observation_json())
    recorded = examine(msgspec.json.decode(body, type=Observation))
    assert [each.rule for each in recorded.findings] == [each["rule"] for each in shown["findings"]]


async def test_the_cache_report_counts_hits_prefixes_and_evictions(harness: Harness) -> None:
    (worker,) = await harness.join("d1")
    await serve(harness, worker, "first", decode_trace(cached=0))
    held = list(harness.index._workers["d1"].pending)  # what the first prompt left there
    await worker.subscribed()
    for seq, stored, removed in ((1, held, []), (2, [], [bytes(16)] * 3)):
        worker.publish(
            CacheEvents(worker_id="d1", incarnation="d1-1", seq=seq, stored=stored, removed=removed)
        )
    await until(lambda: harness.fleet.worker("d1").evicted_blocks == 3)
    for number in range(4):
        await serve(harness, worker, f"r{number}", decode_trace(cached=96))
    shown = harness.cache.as_json()
    rates = shown["tokens_per_s"]
    computed = 100 + 4 * 4
    assert rates["prefix_hit_decode"] / rates["computed"] == pytest.approx(4 * 96 / computed)
    (row,) = shown["workers"]
    assert row["hit_rate"] == pytest.approx(4 * 96 / 500), "of the first seconds"
    assert row["evictions_per_s"] > 0
    assert rates["prefix_hit_prefill"] == 0
    (prefix,) = shown["prefixes"]
    assert (prefix["num_blocks"], prefix["num_tokens"]) == (24, 96)
    assert (prefix["hits_per_min"], prefix["tokens_saved_per_min"]) == (4, 384)
    assert prefix["workers"] == ["d1"]
    curve = shown["miss_curve"]
    assert curve["points"][-1]["miss_ratio"] == pytest.approx(1 / 5)
    assert json.loads(json.dumps(shown)) == shown


async def test_minutes_end_and_their_rates_stay(harness: Harness) -> None:
    now = [0]
    harness.traces.wall_us = lambda: now[0]
    harness.cache._since_us = 0
    (worker,) = await harness.join("d1")
    await serve(harness, worker, "r", decode_trace(cached=48))
    await harness.join("d2")
    harness.fleet.worker("d1").evicted_blocks = 120
    harness.fleet.worker("d2").evicted_blocks = 60
    now[0] = 61_000_000
    harness.cache.sample()
    shown, other = harness.cache.as_json()["workers"]
    assert (shown["hit_rate"], shown["hit_rate_history"]) == (0.48, [0.48])
    assert (shown["evictions_per_s"], other["evictions_per_s"]) == (2, 1)
    assert harness.cache.as_json()["evictions_history"] == [2], "of the worker that evicts most"
    assert harness.cache.as_json()["history_end_us"] == 60_000_000
    assert harness.cache.as_json()["tokens_per_s"]["prefix_hit_decode"] == 48 / 60
    now[0] = 121_000_000
    harness.cache.sample()
    shown, _ = harness.cache.as_json()["workers"]
    assert shown["hit_rate_history"] == [0.48, None]
    assert shown["evictions_per_s"] == 0


async def test_ranks_have_the_time_that_they_computed_within_the_window(
    harness: Harness, observer: FleetObserver
) -> None:
    (worker,) = await harness.join("d1", tensor_parallel=2)
    await worker.subscribed()
    for busy in ((70, 90), (100, 150)):
        worker.publish(msgspec.structs.replace(stats_of(worker), rank_busy_us=busy))
        await until(lambda busy=busy: busy_of(harness, "d1") == busy)
        await observer.sample()
    (facts,) = observer.observe().workers
    assert (facts.tensor_parallel, facts.rank_busy_us) == (2, (30, 60))


def busy_of(harness: Harness, worker_id: str) -> tuple[int, ...] | None:
    stats = harness.fleet.worker(worker_id).stats
    return None if stats is None else stats.rank_busy_us
