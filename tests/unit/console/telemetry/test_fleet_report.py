"""The object of `GET /fleet`: its parts, and what requests, losses and loads make of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import msgspec
import pytest

from protocol.messages import FinishReason, Generate, Prefill, PrefillDone
from protocol.registration import WorkerState
from protocol.traces import ChunkSpan, WriteSpan
from tests.unit.router.fake_worker import prefill_trace
from tests.unit.router.router_harness import Consumer, Harness, request, stats_of, until

PARTS = {
    "workers", "pools", "keys", "store", "routers", "hosts", "logs", "tiers", "apart", "pairs",
    "pressure", "totals", "targets", "clock", "history", "events",
}  # fmt: skip


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.close()


def worker_of(harness: Harness, worker_id: str) -> dict:
    return next(e for e in harness.report.as_json()["workers"] if e["worker_id"] == worker_id)


async def test_every_part_is_there_before_any_worker(harness: Harness) -> None:
    harness.report.sample()
    harness.report.set_headline(())
    shown = harness.report.as_json()
    assert set(shown) == PARTS
    assert json.loads(json.dumps(shown)) == shown
    assert shown["pressure"]["verdict"] == "No worker has joined"
    assert shown["pressure"]["prefill"] is shown["pressure"]["decode"] is None
    assert shown["totals"]["goodput"] is None
    assert shown["targets"] == {
        "ttft_target_ms": 1000.0, "tpot_target_ms": None, "goodput_target": 0.95,
    }  # fmt: skip
    assert shown["history"]["step_ms"] == 30_000


async def test_the_workers_own_target_unless_one_is_set(harness: Harness) -> None:
    await harness.join("d1", itl_target_ms=40.0)
    await harness.join("d2", itl_target_ms=30.0)
    assert harness.report.as_json()["targets"]["tpot_target_ms"] == 30.0
    harness.report.targets.tpot_target_ms = 99.0
    assert harness.report.as_json()["targets"]["tpot_target_ms"] == 99.0


async def test_a_lost_worker_stays_until_it_is_back(harness: Harness) -> None:
    await harness.join("d1", "d2")
    consumer = Consumer(harness.dispatcher, request(10))
    await until(lambda: any(w.received.count(Generate) for w in harness.workers.values()))
    (victim,) = [n for n, w in harness.workers.items() if w.received.count(Generate)]
    await harness.kill(victim)
    await until(lambda: worker_of(harness, victim)["state"] == "lost")
    await until(lambda: harness.fleet.worker(victim) is None)
    shown = worker_of(harness, victim)
    assert shown["requests_moved"] == 1
    assert shown["lost_us"] > 0
    assert "its lease ended" in shown["lost_reason"]
    assert shown["connected"] is False
    (event,) = [e for e in harness.report.as_json()["events"] if e["kind"] == "lost"]
    assert event["worker_id"] == victim
    assert "1 request moved" in event["text"]
    await consumer.cancel()
    await harness.join(victim, incarnation="another")
    assert worker_of(harness, victim)["state"] == "ready"
    assert worker_of(harness, victim)["lost_us"] is None
    assert [e["kind"] for e in harness.report.as_json()["events"]] == ["lost", "joined"]


async def test_a_drain_has_a_deadline_and_is_no_loss(harness: Harness) -> None:
    await harness.join("d1", "d2", drain_grace_s=30.0)
    draining = harness.workers["d1"]
    draining.info = msgspec.structs.replace(draining.info, state=WorkerState.DRAINING)
    harness.refresh()
    shown = worker_of(harness, "d1")
    begun = next(e for e in harness.report.as_json()["events"] if e["kind"] == "drain")
    left_us = shown["drain_deadline_us"] - begun["at_us"]
    assert abs(left_us - 30_000_000) <= 10_000
    await harness.kill("d1")
    await until(lambda: harness.fleet.worker("d1") is None)
    workers = harness.report.as_json()["workers"]
    assert [each["worker_id"] for each in workers] == ["d2"]


async def test_a_pair_and_the_totals_after_a_split_request(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1", itl_target_ms=50.0)
    consumer = Consumer(harness.dispatcher, request(100, "r-0"))
    generate = await decode.received.next(Generate)
    leg = await prefill.received.next(Prefill)
    chunks = (ChunkSpan(1000, 21_000, 100),)
    prefill.first_token(leg, 7, chunks=chunks)
    decode.tokens(generate, 1, [8, 9], finish=FinishReason.STOP)
    await consumer.end()
    writes = (WriteSpan(11_000, 21_000, 10, 0), WriteSpan(16_000, 31_000, 15, 0))
    done = prefill_trace(
        "p1", chunks=chunks, writes=writes, transport="nixl", blocks_moved=25,
        bytes_moved=20_000,
    )  # fmt: skip
    prefill.send(PrefillDone(request_id="r-0", attempt=leg.attempt, trace=done))
    await until(lambda: bool(harness.report.as_json()["pairs"]))
    shown = harness.report.as_json()
    (pair,) = shown["pairs"]
    assert (pair["prefill"], pair["decode"], pair["path"]) == ("p1", "d1", "unknown")
    assert pair["busy_bytes_per_s"] == 20_000 / 0.020, "the writes overlap"
    assert pair["exposed_p95_ms"] == pytest.approx(10, rel=0.02)
    assert pair["failures"] == 0
    assert pair["is_below_way"] is False
    totals = shown["totals"]
    assert totals["goodput"] == 1.0
    assert totals["bytes_moved_per_s"] > 0
    assert totals["ttft_p95_ms"] is not None


async def test_pressure_from_the_step_models_of_the_workers(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1", itl_target_ms=10.0, chunk_max_tokens=100)
    for worker, running, used in ((decode, 4, 500), (prefill, 0, 0)):
        await worker.subscribed()
        stats = msgspec.structs.replace(
            stats_of(worker, running), queued_tokens=300, blocks_used=used, step_fixed_us=5_000.0,
            step_per_token_us=1_000.0,
        )  # fmt: skip
        worker.publish(stats)
        await until(lambda name=worker.info.worker_id: harness.fleet.worker(name).stats is not None)
    consumer = Consumer(harness.dispatcher, request(100, "r-0"))
    leg = await prefill.received.next(Prefill)
    harness.report.sample()
    harness.report.set_headline(())
    pressure = harness.report.as_json()["pressure"]
    # 300 queued, 100 reserved for the running request, 100 of the next one, in 5 chunks
    assert pressure["predicted_ttft_ms"] == pytest.approx(500 + 5 * 5)
    assert pressure["prefill"] == pytest.approx(0.525)
    assert pressure["predicted_step_ms"] == pytest.approx(9.0)
    assert pressure["decode"] == pytest.approx(0.9)
    assert pressure["verdict"] == "Both pools have room"
    trace = harness.traces.get("r-0")
    assert trace.attempts[0].placement.ttft_ms == pytest.approx(400 + 4 * 5)
    prefill.first_token(leg, 7, finish=FinishReason.STOP)
    await consumer.end()
    sample = "baton_time_to_first_token_prediction_error_seconds_count"
    assert harness.registry.get_sample_value(sample) == 1
