"""Cached conversations of a worker that drains, where layers keep windows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.handoff_messages import KvFetch
from tests.layouts import windowed_layout
from tests.unit.fake_model import BLOCK
from tests.unit.leaving_workers import (
    POOL,
    computes,
    drain,
    has_ended,
    prompt_of,
    run_until_ended,
    talk,
)
from tests.unit.test_fetches import until
from tests.unit.worker_fleet import WorkerFleet
from tests.unit.worker_harness import LANDING_S
from worker.counters import Count
from worker.served_fetches import ServedFetches


@pytest.fixture
def windowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerFleet]:
    """Workers whose layers keep windows that reach back two and four blocks."""
    monkeypatch.setattr("worker.served_fetches.SERVE_SHARE", 1.0)
    made = WorkerFleet((1, 3, 1), (POOL, POOL), layout=windowed_layout(BLOCK, 9, 17))
    yield made
    made.check_nothing_is_held()
    made.close()


@pytest.mark.parametrize("num_blocks", [1, 3, 5, 12, 30])
def test_what_windows_see_from_the_end_of_a_conversation_moves_with_it(
    windowed: WorkerFleet, num_blocks: int
) -> None:
    """A part has at most sixteen blocks."""
    prompt = prompt_of(1, num_blocks)
    talk(windowed, "one", prompt)
    sent = windowed.workers["d2"].counter(Count.BLOCKS_SENT)
    leaver = drain(windowed, "d2", "d3")
    run_until_ended(windowed, leaver)
    moved = num_blocks + min(2, num_blocks) + min(4, num_blocks)
    assert leaver.counter(Count.BLOCKS_SENT) - sent == moved
    assert computes(windowed, "d3", [*prompt, 7]) == 2


def test_a_taker_that_has_all_but_the_windows_gets_them(windowed: WorkerFleet) -> None:
    prompt = prompt_of(1, 12)
    for name in ("d2", "d3"):
        talk(windowed, f"on {name}", prompt, name)
    for manager in windowed.workers["d3"].scheduler.pools.managers[1:]:
        manager.clear_cache()
    run_until_ended(windowed, drain(windowed, "d2", "d3"))
    assert windowed.workers["d3"].counter(Count.TAKEN_BLOCKS) == 4
    assert computes(windowed, "d3", [*prompt, 7]) == 2


def test_what_no_window_can_end_stays_behind(windowed: WorkerFleet) -> None:
    prompt = prompt_of(1, 12)
    talk(windowed, "one", prompt)
    windowed.workers["d2"].scheduler.pools.managers[2].clear_cache()
    leaver = drain(windowed, "d2", "d3")
    run_until_ended(windowed, leaver)
    assert leaver.counter(Count.SERVED_BLOCKS) == 0


def test_windows_may_be_more_than_a_holder_serves_at_a_time(
    windowed: WorkerFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.served_fetches.SERVE_SHARE", 1 / 32)
    prompt = prompt_of(1, 5)
    talk(windowed, "one", prompt)
    run_until_ended(windowed, drain(windowed, "d2", "d3"))
    assert computes(windowed, "d3", [*prompt, 7]) == 2


def test_a_holder_that_is_busy_with_an_end_is_asked_until_it_is_not(
    windowed: WorkerFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the holder says so: what never came takes none of the taker's room."""
    fits, num_busy = ServedFetches._fits, 0

    def fit_later(served: ServedFetches, found: list[list[int]]) -> bool:
        nonlocal num_busy
        num_busy += any(found[1:])
        return num_busy > 15 and fits(served, found)

    prompt = prompt_of(1, 4)
    talk(windowed, "one", prompt)
    monkeypatch.setattr(ServedFetches, "_fits", fit_later)
    run_until_ended(windowed, drain(windowed, "d2", "d3"))
    assert num_busy > 15
    assert computes(windowed, "d3", [*prompt, 7]) == 2


@pytest.mark.parametrize("how", ["dies", "gets no room", "is busy for ever"])
def test_a_conversation_with_windows_that_cannot_move_holds_nothing_up(
    windowed: WorkerFleet, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(windowed, "one", prompt_of(1, 12))
    taker = windowed.workers["d3"]
    if how == "is busy for ever":
        monkeypatch.setattr("worker.served_fetches.ServedFetches._fits", lambda *_: False)
        monkeypatch.setattr("worker.inbound.taken_caches.MOST_BUSY", 5)
    running = taker.scheduler.blocks.allocate(2 * POOL - 8) if how == "gets no room" else []
    leaver = drain(windowed, "d2", "d3")
    if how == "dies":
        until(windowed, "d3", KvFetch)
        windowed.kill("d2")
        windowed.round()
        windowed.check_blocks()
        windowed.clock.now += LANDING_S
        windowed.round()
    for _ in range(60):
        windowed.clock.now += 0.03
        windowed.round()
    assert how == "dies" or has_ended(leaver)
    taker.scheduler.blocks.release(running)
    assert taker.scheduler.pools.num_used == 0
