"""Predictions of the load that one unlucky moment does not move."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from console.telemetry.fleet_load import FleetLoad, SteadyLoad, fleet_load
from protocol.messages import Prefill, Role
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.router_harness import Consumer, Harness, request, stats_of, until


def load(ttft_ms: float | None, step_ms: float | None) -> FleetLoad:
    return FleetLoad(ttft_ms, step_ms, 0.25, "prefill", "decode")


def test_one_unlucky_moment_moves_no_prediction() -> None:
    steady = SteadyLoad()
    seen = [
        steady.sample(load(ttft_ms, 9.0))
        for ttft_ms in (80.0, 82.0, 81.0, 41_430.0, 79.0, 5_903.0, 83.0)
    ]
    assert max(each.predicted_ttft_ms or 0.0 for each in seen) <= 83.0
    assert {each.predicted_step_ms for each in seen} == {9.0}
    assert {each.blocks_wanted for each in seen} == {0.25}


def test_a_lasting_change_shows_within_three_samples() -> None:
    steady = SteadyLoad()
    for _ in range(10):
        steady.sample(load(80.0, 9.0))
    shown = [steady.sample(load(900.0, 30.0)) for _ in range(3)]
    assert (shown[-1].predicted_ttft_ms, shown[-1].predicted_step_ms) == (900.0, 30.0)


def test_what_is_not_predicted_is_not_known_and_forgotten() -> None:
    steady = SteadyLoad()
    steady.sample(load(80.0, 9.0))
    idle = steady.sample(load(None, None))
    assert (idle.predicted_ttft_ms, idle.predicted_step_ms) == (None, None)
    assert steady.sample(load(20.0, 3.0)).predicted_ttft_ms == 20.0


def test_requests_that_wait_and_places_that_are_taken_are_pressure() -> None:
    calm = load(100.0, 10.0)
    assert calm.decode_pressure(1000.0, 50.0) == 0.25, "the share of blocks"
    full = replace(calm, places_wanted=1.0)
    assert replace(calm, places_wanted=10.0).decode_pressure(1000.0, 50.0) == 10.0
    assert full.decode_pressure(1000.0, 50.0) == 1.0
    crowded = replace(full, waits_ms=3800.0, waits_for=Role.DECODE)
    assert crowded.decode_pressure(1000.0, 50.0) == 3.8
    assert crowded.prefill_pressure(1000.0) == 0.1, "they do not wait for prefill"
    queued = replace(calm, waits_ms=2500.0, waits_for=Role.PREFILL)
    assert queued.prefill_pressure(1000.0) == 2.5
    assert queued.decode_pressure(1000.0, 50.0) == 0.25
    assert load(None, None).prefill_pressure(1000.0) is None


async def test_the_pool_before_which_requests_wait() -> None:
    harness = Harness()
    try:
        decode, prefill = await harness.join("d1", "p1", max_batch_size=4)
        for worker in (decode, prefill):
            await worker.subscribed()
        consumer = Consumer(harness.dispatcher, request(100, "a-0"))
        await prefill.received.next(Prefill)

        async def waits_for(running: int, in_decode: int, in_prefill: int) -> Role | None:
            for worker, number, waiting in ((decode, running, in_decode), (prefill, 0, in_prefill)):
                stats = msgspec.structs.replace(stats_of(worker, number), num_waiting=waiting)
                worker.publish(stats)
                await until(lambda: _has(harness, worker, waiting))  # noqa: B023
            return fleet_load(harness.fleet, harness.traces).waits_for

        assert await waits_for(running=2, in_decode=0, in_prefill=0) is None
        assert await waits_for(running=4, in_decode=5, in_prefill=0) is Role.DECODE
        assert fleet_load(harness.fleet, harness.traces).places_wanted == 9 / 4
        assert await waits_for(running=2, in_decode=1, in_prefill=3) is Role.PREFILL
        assert fleet_load(harness.fleet, harness.traces).places_wanted == 2 / 4
        assert fleet_load(harness.fleet, harness.traces).waits_ms > 0
        await consumer.cancel()
    finally:
        await harness.close()


def _has(harness: Harness, worker: FakeWorker, waiting: int) -> bool:
    known = harness.fleet.worker(worker.info.worker_id)
    return known.stats is not None and known.stats.num_waiting == waiting
