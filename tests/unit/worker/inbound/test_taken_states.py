"""Cached conversations of a worker that drains, in a model whose layers keep states: others take
the state at a prefix's end over with its keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from protocol.handoff_messages import KvFetch
from tests.layouts import state_layout
from tests.unit.fake_model import BLOCK
from tests.unit.leaving_workers import (
    computes,
    drain,
    has_ended,
    prompt_of,
    run_until_ended,
    talk,
)
from tests.unit.test_fetches import until
from tests.unit.worker_fleet import WorkerFleet
from tests.unit.worker_harness import LANDING_S, Bench
from worker.counters import Count

STATES, IN_A_PAGE = 1, 10
"""The number of the group with states; blocks of the other one that take a state's memory."""


def fleet_of(num_pages: int) -> Iterator[WorkerFleet]:
    made = WorkerFleet((1, 3, 1), (num_pages, num_pages), layout=state_layout(BLOCK, 38))
    yield made
    made.check_nothing_is_held()
    made.close()


@pytest.fixture
def fleet() -> Iterator[WorkerFleet]:
    yield from fleet_of(24)


@pytest.fixture
def small() -> Iterator[WorkerFleet]:
    """Workers of whose pools a state is an eighth."""
    yield from fleet_of(8)


@pytest.mark.parametrize("num_blocks", [1, 5, 40])
def test_a_conversation_moves_with_its_last_state(fleet: WorkerFleet, num_blocks: int) -> None:
    prompt = prompt_of(1, num_blocks)
    talk(fleet, "one", prompt)
    leaver = drain(fleet, "d2", "d3")
    run_until_ended(fleet, leaver)
    assert leaver.counter(Count.BLOCKS_SENT) == num_blocks + 1
    assert computes(fleet, "d3", [*prompt, 7]) == 2


def test_a_state_may_be_more_than_a_holder_serves_at_a_time(small: WorkerFleet) -> None:
    prompt = prompt_of(1, 5)
    talk(small, "one", prompt)
    run_until_ended(small, drain(small, "d2", "d3"))
    assert computes(small, "d3", [*prompt, 7]) == 2


def test_what_has_no_state_stays_behind(fleet: WorkerFleet) -> None:
    talk(fleet, "one", prompt_of(1, 12))
    fleet.workers["d2"].scheduler.pools.managers[STATES].clear_cache()
    leaver = drain(fleet, "d2", "d3")
    run_until_ended(fleet, leaver)
    assert leaver.counter(Count.BLOCKS_SENT) == 0


def test_a_taker_that_has_all_but_the_state_gets_it(fleet: WorkerFleet) -> None:
    prompt = prompt_of(1, 12)
    for name in ("d2", "d3"):
        talk(fleet, f"on {name}", prompt, name)
    fleet.workers["d3"].scheduler.pools.managers[STATES].clear_cache()
    run_until_ended(fleet, drain(fleet, "d2", "d3"))
    assert computes(fleet, "d3", [*prompt, 7]) == 2


def test_a_full_cache_gives_up_half_of_itself_at_most_and_states_count(
    fleet: WorkerFleet,
) -> None:
    taker = fleet.workers["d3"].scheduler.pools.managers[STATES]
    for first in range(1, 9):
        talk(fleet, f"old{first}", prompt_of(first, 7), "d3")
    old = taker.hashes()
    for first in range(1, 9):
        talk(fleet, f"new{first}", [9, *prompt_of(first, 7)], "d2")
    run_until_ended(fleet, drain(fleet, "d2", "d3"))
    assert fleet.workers["d3"].counter(Count.TAKEN_BLOCKS) > 0
    assert sum(map(taker.is_cached, old)) >= len(old) // 2


@contextmanager
def room_for(num_blocks: int, fleet: WorkerFleet, name: str) -> Iterator[None]:
    """A worker with so many free blocks, while others drain."""
    blocks = fleet.workers[name].scheduler.blocks
    taken = blocks.allocate(blocks.num_free - num_blocks)
    yield
    blocks.release(taken)


def let_end(fleet: WorkerFleet, leaver: Bench) -> None:
    for _ in range(60):
        fleet.clock.now += 0.02
        fleet.round()
    assert has_ended(leaver)


def test_a_state_takes_room_as_blocks_do(fleet: WorkerFleet) -> None:
    for first in range(1, 6):
        talk(fleet, f"r{first}", prompt_of(first, 7))
    with room_for(2 * (7 + IN_A_PAGE) + 6, fleet, "d3"):
        let_end(fleet, drain(fleet, "d2", "d3"))
    assert fleet.workers["d3"].counter(Count.TAKEN_BLOCKS) == 2 * 7


def test_nothing_is_taken_of_what_leaves_no_room_for_the_state_at_its_end(
    fleet: WorkerFleet,
) -> None:
    taker = fleet.workers["d3"].scheduler.pools
    talk(fleet, "one", prompt_of(1, 36))
    (hashes,) = fleet.workers["d2"].scheduler.blocks.idle_prefixes()
    with room_for(36 + IN_A_PAGE - 6, fleet, "d3"):
        let_end(fleet, drain(fleet, "d2", "d3"))
    assert taker.match(hashes).num_blocks == taker.managers[0].num_cached < 36


def test_a_holder_that_dies_leaves_no_state_without_its_prefix(fleet: WorkerFleet) -> None:
    prompt = prompt_of(1, 5)
    talk(fleet, "one", prompt)
    drain(fleet, "d2", "d3")
    until(fleet, "d3", KvFetch)
    fleet.kill("d2")
    fleet.round()
    fleet.check_blocks()
    fleet.clock.now += LANDING_S
    fleet.round()
    assert computes(fleet, "d3", [*prompt, 7]) == len(prompt) + 1
