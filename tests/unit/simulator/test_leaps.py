"""A leap over steps in which only decodes advance leaves what as many steps leave."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.layout import KvLayout
from protocol.messages import Role
from scheduling.block_manager import BlockManager
from scheduling.large_pages import GroupBlocks
from scheduling.scheduler import Scheduler
from scheduling.step_model import StepModel
from simulator.fleet import Fleet, Outcome
from simulator.leaps import longest_leap
from simulator.router import Reports
from simulator.sequences import SimulatedSequence, simulated_sequence
from simulator.traces.sessions import Session
from simulator.worker import SimulatedWorker
from tests.effort import times
from tests.layouts import state_layout, windowed_layout
from tests.unit.simulator.fleets import BLOCK, served, single, small_fleet, worker_spec

LAYOUTS = {
    "all tokens": None,
    "a window": windowed_layout(BLOCK, 9),
    "two windows": windowed_layout(BLOCK, 5, 18),
    "states": state_layout(BLOCK, 20),
}


@st.composite
def sessions(draw: st.DrawFn) -> list[Session]:
    """Requests at close times, some of which share blocks; the pools are small for them."""
    found = []
    for number in range(draw(st.integers(1, 14))):
        at = draw(st.integers(0, 60)) / 50
        prompt, output = draw(st.integers(1, 70)), draw(st.integers(1, 60))
        shared = draw(st.integers(0, prompt // 4))
        whole = (prompt + draw(st.sampled_from([0, output]))) // 4
        runs = ((1000, shared), (2000 + 100 * number, whole - shared))
        ids = tuple(run for run in runs if run[1])
        found.append(single(at, prompt, output, ids if draw(st.booleans()) else ()))
    return found


def courses(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [
        (
            each.decode, each.prefill, each.prompt_done, each.first_token, each.end,
            each.cached_tokens, each.num_preemptions, each.failure,
        )
        for each in outcome.requests
    ]  # fmt: skip


def caches(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [
        (
            [blocks_of(manager) for manager in each.scheduler.pools.managers],
            each.scheduler.model.coefficients,
            each.usage.num_steps,
            each.usage.decode_tokens,
        )
        for each in outcome.workers
    ]


def blocks_of(manager: BlockManager) -> tuple[Any, ...]:
    """What is cached where, and what is evicted next."""
    free = list(manager._free)
    if not isinstance(manager, GroupBlocks):
        return ([manager._hash_of[block] for block in free], len(manager._blank))
    manager.check()
    assert not manager.num_pinned
    pages = manager.pages
    return (manager._hash_of, free, manager._freed_at, pages._unowned, list(pages._idle.items()))


@settings(max_examples=times(40, 900), deadline=None)
@given(
    sessions(),
    st.integers(0, 1),
    st.integers(28, 40),
    st.sampled_from([1, 2]),
    st.sampled_from(sorted(LAYOUTS)),
)
def test_a_leap_is_as_many_steps(
    requests: list[Session], prefill: int, num_blocks: int, decode: int, layout: str
) -> None:
    num_blocks *= 3 if layout == "states" else 1  # a page for each state

    def run(max_leap: int) -> Outcome:
        fleet: Fleet = small_fleet(prefill, decode, num_blocks, max_leap, layout=LAYOUTS[layout])
        return served(fleet, *requests)

    leaping, stepping = run(4096), run(1)
    assert str(courses(leaping)) == str(courses(stepping))  # nan is not equal to itself
    assert caches(leaping) == caches(stepping)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_leaps_are_long(layout: KvLayout | None) -> None:
    """Sixty steps of two requests take a handful of events."""
    fleet = small_fleet(prefill=0, decode=1, num_blocks=120, layout=layout)
    outcome = served(fleet, single(0.0, 8, 60), single(0.0, 8, 60))
    assert outcome.workers[0].usage.num_steps >= 60
    assert fleet.num_events < 30


def test_leaps_report_when_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a request that waits for blocks ends with its first token."""
    changes: list[tuple[str, float]] = []
    on_change = Reports.on_change

    def noting(reports: Reports, worker: SimulatedWorker) -> None:
        changes.append((worker.name, reports._queue.now))
        on_change(reports, worker)

    monkeypatch.setattr(Reports, "on_change", noting)
    found = []
    for max_leap in (4096, 1):
        fleet = small_fleet(decode=1, num_blocks=24, max_leap=max_leap)
        served(fleet, single(0.0, 8, 60), single(0.1, 80, 1))
        found.append(changes.copy())
        changes.clear()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("layout", "num_blocks"), [("all tokens", 30), ("a window", 31), ("two windows", 26)]
)
def test_leaps_end_before_requests_are_preempted(layout: str, num_blocks: int) -> None:
    """Where pools are tight, also for layers with windows."""
    found = []
    for max_leap in (4096, 1):
        fleet = small_fleet(0, 1, num_blocks, max_leap, layout=LAYOUTS[layout])
        outcome = served(fleet, *(single(0.0, 40, 60) for _ in range(3)))
        assert outcome.workers[0].usage.num_preemptions > 0
        found.append((courses(outcome), caches(outcome)))
    assert found[0] == found[1]


def test_leaps_end_before_a_window_makes_room_for_a_waiting_request() -> None:
    found = []
    for max_leap in (4096, 1):
        fleet = small_fleet(0, 1, 22, max_leap, layout=LAYOUTS["two windows"])
        outcome = served(fleet, single(0.18, 34, 40), single(0.6, 53, 1))
        found.append((courses(outcome), caches(outcome)))
    assert found[0] == found[1]


def request(number: int, prompt: int, output: int, is_cached: bool = False) -> SimulatedSequence:
    num_blocks = (prompt + output) // BLOCK if is_cached else 0
    content = tuple(bytes([number, block]) for block in range(num_blocks))
    return simulated_sequence(f"r{number}", prompt, output, content, BLOCK, arrival=0.0)


def decoding(layout: str, num_blocks: int, sequence: SimulatedSequence) -> Scheduler:
    """A scheduler whose next planned step decodes the sequence, which has its first token."""
    spec = worker_spec(Role.DECODE, num_blocks, layout=LAYOUTS[layout])
    scheduler = Scheduler(spec.config, spec.pools(), StepModel())
    scheduler.add(sequence)
    while not (batch := scheduler.schedule(0.0)).decodes:
        scheduler.commit(batch, [0] * len(batch.sampled), 0.0)
    return scheduler


@pytest.mark.parametrize(
    ("is_remote", "has_begun", "num_steps"), [(False, False, 1), (True, True, 1), (True, False, 39)]
)
def test_no_leap_if_a_waiting_request_may_be_admitted(
    is_remote: bool, has_begun: bool, num_steps: int
) -> None:
    """It may be admitted if it computes its own prompt, or if its source has begun with it."""
    sequence, waiting = request(1, 20, 40), request(2, 20, 40)
    scheduler = decoding("a window", 40, sequence)
    waiting.remote, waiting.source_has_begun = is_remote, has_begun
    scheduler.add(waiting)
    assert longest_leap(scheduler, [sequence]) == num_steps


@pytest.mark.parametrize(
    ("layout", "num_cached_steps"), [("a window", 23), ("two windows", 19), ("all tokens", 39)]
)
def test_cached_blocks_that_leave_a_window_may_need_two_pages_at_a_boundary(
    layout: str, num_cached_steps: int
) -> None:
    """Of 39 steps, a leap has as many as the free pages allow. If nothing is cached, the block that
    leaves the window makes room for the next one."""
    for is_cached, num_steps in ((True, num_cached_steps), (False, 39)):
        sequence = request(1, 20, 40, is_cached)
        scheduler = decoding(layout, 16, sequence)
        assert longest_leap(scheduler, [sequence]) == num_steps
