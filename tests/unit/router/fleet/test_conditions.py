"""The condition of each worker, and why no request can be served."""

from __future__ import annotations

import time

from protocol.registration import WorkerState
from router.fleet.conditions import USABLE, Cause, State, StoreState
from tests.unit.router.fleet.members import change
from tests.unit.router.router_harness import Harness, until


async def test_reasons_tell_how_each_decode_worker_stands(harness: Harness) -> None:
    await harness.join("d1")
    await harness.join("p1")
    fleet = harness.fleet
    assert fleet.condition(harness.workers["d1"].info) == USABLE
    await harness.workers["d1"].close()
    await until(lambda: not fleet.worker("d1").link.is_ready)
    broke = "no decode worker is ready: d1 is {}: its connection broke"
    assert fleet.not_ready_reason() in (broke.format("not connected"), broke.format("lost"))
    stray = harness.make("d2", model_fingerprint="others")
    harness.workers["d2"] = stray
    loading = harness.make("d3", state=WorkerState.LOADING, control="", events="")
    harness.workers["d3"] = loading
    harness.refresh()
    reason = fleet.not_ready_reason()
    assert "d2 is refused: it serves another version of 'model' than this fleet" in reason
    assert "d3 is starting: it loads its weights" in reason
    shown = {each["worker_id"]: each["condition"] for each in fleet.as_json()}
    assert shown["p1"]["state"] == "usable"
    assert (shown["d2"]["state"], shown["d2"]["cause"]) == ("refused", "other_model")


async def test_a_worker_that_does_not_answer_is_not_usable(harness: Harness) -> None:
    await harness.join("d1")
    now = time.monotonic() + harness.settings.silence_s + 1
    harness.fleet.now = lambda: now
    harness.fleet.sweep()
    condition = harness.fleet.conditions()["d1"]
    assert (condition.state, condition.cause) == (State.SILENT, Cause.SILENT)
    assert harness.metric("workers", role="decode") == 0


async def test_a_condition_has_the_time_since_which_it_holds(harness: Harness) -> None:
    await harness.join("d1")
    first = harness.fleet.conditions()["d1"]
    harness.refresh()
    assert harness.fleet.conditions()["d1"] == first, "a later look changes nothing"
    change(harness, "d1", state=WorkerState.STALLED)
    stalled = harness.fleet.conditions()["d1"]
    assert stalled.state is State.STALLED
    assert stalled.since_us > first.since_us


async def test_a_lost_worker_is_missed_until_one_of_its_role_comes(harness: Harness) -> None:
    await harness.join("d1", "d2", "p1")
    await harness.kill("d1")
    lost = harness.fleet.conditions()["d1"]
    assert (lost.state, lost.cause, lost.is_replaced) == (State.LOST, Cause.LOST, False)
    assert lost.since_us > 0
    await harness.join("p2")
    lost = harness.fleet.conditions()["d1"]
    assert not lost.is_replaced, "another role's worker is no substitute"
    await harness.join("d3")
    assert harness.fleet.conditions()["d1"].is_replaced
    await harness.kill("d2")
    conditions = harness.fleet.conditions()
    assert [conditions[each].is_replaced for each in ("d1", "d2")] == [True, False]


async def test_a_worker_that_comes_back_takes_no_other_s_place(harness: Harness) -> None:
    await harness.join("d1", "d2", "d3")
    await harness.kill("d2")
    await harness.kill("d1")
    await harness.join("d1", incarnation="another")
    conditions = harness.fleet.conditions()
    assert conditions["d1"].state is State.USABLE
    assert not conditions["d2"].is_replaced


async def test_a_full_worker_is_usable(harness: Harness) -> None:
    (worker,) = await harness.join("d1", num_blocks=10)
    harness.fleet.worker("d1").reserve(0, 10)
    assert harness.fleet.condition(worker.info) == USABLE
    assert harness.fleet.not_ready_reason() is None


async def test_trouble_with_the_store_is_part_of_the_reason(harness: Harness) -> None:
    harness.fleet.store_state = lambda: StoreState("redis://x refuses our password: WRONGPASS")
    assert harness.fleet.not_ready_reason() == (
        "no decode worker is registered; redis://x refuses our password: WRONGPASS"
    )
