"""Cached conversations of a worker that drains: others take them over before it ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import pytest

from protocol.handoff_messages import CacheAsk, CachedPrefix, CacheOffer, KvFetch
from protocol.layout import KvGroup
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
from tests.unit.worker_fleet import Request, WorkerFleet
from tests.unit.worker_harness import LANDING_S
from worker.counters import Count
from worker.inbound.leaving_cache import QUIET_S


@pytest.fixture
def fleet() -> Iterator[WorkerFleet]:
    made = WorkerFleet((1, 3, 1), (POOL, POOL))
    yield made
    made.is_calm = False
    for bench in made.workers.values():
        assert bench.scheduler.blocks.num_pinned == 0, bench.name
        assert bench.sink.num_open == 0
    made.close()


@pytest.mark.parametrize("name", ["d2", "p1"])
def test_the_next_turn_computes_only_what_is_new(fleet: WorkerFleet, name: str) -> None:
    prompt = prompt_of(1, 5)
    talk(fleet, "one", prompt, p="p1" if name == "p1" else None)
    leaver = drain(fleet, name, "d3")
    run_until_ended(fleet, leaver)
    assert fleet.workers["d3"].counter(Count.TAKEN_BLOCKS) == 5
    assert leaver.counter(Count.SERVED_BLOCKS) == 5
    assert computes(fleet, "d3", [*prompt, 7]) == 2


def test_what_may_be_kept_in_pools_only_stays_so(fleet: WorkerFleet) -> None:
    prompt = prompt_of(1, 5)
    talk(fleet, "one", prompt)
    blocks = fleet.workers["d2"].scheduler.blocks
    blocks._stays_here.add(next(iter(blocks._block_of.values())))
    run_until_ended(fleet, drain(fleet, "d2", "d3"))
    taken = fleet.workers["d3"].scheduler.blocks
    assert taken.num_cached == 5
    assert taken.coldest(POOL) == []


def test_each_conversation_goes_to_one_worker_the_newest_first(fleet: WorkerFleet) -> None:
    prompts = [prompt_of(first, 3) for first in range(1, 7)]
    for first, prompt in enumerate(prompts):
        talk(fleet, f"r{first}", prompt)
    newest = next(iter(fleet.workers["d2"].scheduler.blocks.idle_prefixes()))
    leaver = drain(fleet, "d2", "d3", "d4")
    until(fleet, "d2", CachedPrefix)
    named = [
        message.hashes
        for queue in fleet.channels.values()
        for message in queue
        if isinstance(message, CachedPrefix)
    ]
    assert newest in named
    run_until_ended(fleet, leaver)
    taken = {name: fleet.workers[name].counter(Count.TAKEN_BLOCKS) for name in ("d3", "d4")}
    assert sum(taken.values()) == 18
    assert all(taken.values())


def test_a_worker_that_lacks_room_takes_what_was_used_last(fleet: WorkerFleet) -> None:
    for first in range(1, 5):
        talk(fleet, f"r{first}", prompt_of(first, 6))
    taker = fleet.workers["d3"].scheduler.blocks
    running = taker.allocate(POOL - 8)
    leaver = drain(fleet, "d2", "d3")
    for _ in range(30):
        fleet.round()
    assert has_ended(leaver)
    assert fleet.workers["d3"].counter(Count.TAKEN_BLOCKS) == 8
    taker.release(running)
    assert computes(fleet, "d3", [*prompt_of(4, 6), 7]) == 2
    assert computes(fleet, "d3", [*prompt_of(1, 6), 7]) == 6 * BLOCK + 2


def test_a_full_cache_gives_up_half_of_itself_at_most(fleet: WorkerFleet) -> None:
    for first in range(1, 9):
        talk(fleet, f"old{first}", prompt_of(first, 7), "d3")
    for first in range(1, 9):
        talk(fleet, f"new{first}", [9, *prompt_of(first, 7)], "d2")
    taker = fleet.workers["d3"].scheduler.blocks
    kept = taker.num_cached
    run_until_ended(fleet, drain(fleet, "d2", "d3"))
    taken = fleet.workers["d3"].counter(Count.TAKEN_BLOCKS)
    assert kept // 2 <= taken <= kept // 2 + POOL - kept


def test_requests_at_the_taker_come_first(fleet: WorkerFleet) -> None:
    talk(fleet, "one", prompt_of(1, 5))
    taker = fleet.workers["d3"]
    running = taker.scheduler.blocks.allocate(POOL - 4)
    waiting = Request("waits", fleet.routers[0], prompt_of(5, 6), 2, 0, False)
    fleet.ask(waiting, None, "d3")
    fleet.round()
    leaver = drain(fleet, "d2", "d3")
    for _ in range(10):
        fleet.round()
    assert taker.counter(Count.TAKEN_BLOCKS) == 0
    assert not has_ended(leaver)
    taker.scheduler.blocks.release(running)
    run_until_ended(fleet, leaver)
    assert taker.counter(Count.TAKEN_BLOCKS) == 5


def test_a_request_gets_the_blocks_of_a_prefix_that_is_half_taken(fleet: WorkerFleet) -> None:
    talk(fleet, "one", prompt_of(1, 20))
    leaver, taker = drain(fleet, "d2", "d3"), fleet.workers["d3"]
    while not taker.counter(Count.TAKEN_BLOCKS):
        fleet.round()
    assert taker.counter(Count.TAKEN_BLOCKS) < 20
    request = Request("needs nearly all", fleet.routers[0], prompt_of(5, POOL - 4), 2, 0, False)
    fleet.ask(request, None, "d3")
    for _ in range(60):
        fleet.round()
    assert request.outcome == "done", fleet.describe()
    run_until_ended(fleet, leaver)


def test_a_busy_holder_is_asked_again(fleet: WorkerFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives one block at a time, of the eight that it is asked for."""
    monkeypatch.setattr("worker.served_fetches.SERVE_SHARE", 0.0)
    talk(fleet, "one", prompt_of(1, 12))
    leaver, taker = drain(fleet, "d2", "d3"), fleet.workers["d3"]
    run_until_ended(fleet, leaver)
    assert taker.counter(Count.TAKEN_BLOCKS) == 12


def test_nobody_is_waited_for_who_is_silent(fleet: WorkerFleet) -> None:
    talk(fleet, "one", prompt_of(1, 5))
    leaver = drain(fleet, "d2", "d3")
    fleet.frozen.add("d3")
    fleet.round()
    assert not has_ended(leaver)
    fleet.clock.now += QUIET_S
    fleet.round()
    assert has_ended(leaver)
    fleet.frozen.clear()


def test_a_taker_that_leaves_the_fleet_itself_is_not_waited_for(fleet: WorkerFleet) -> None:
    """As when a whole fleet is told to stop: each worker has seen the others ready."""
    talk(fleet, "one", prompt_of(1, 5))
    leaver = drain(fleet, "d2", "d3")
    fleet.frozen.add("d3")
    leaver.peers.others_by_now = []
    fleet.round()
    assert not has_ended(leaver)
    fleet.clock.now += QUIET_S / 4
    fleet.round()
    assert has_ended(leaver)
    fleet.frozen.clear()


def test_a_taker_that_fetches_for_long_is_waited_for(fleet: WorkerFleet) -> None:
    talk(fleet, "one", prompt_of(1, 40))
    leaver, taker = drain(fleet, "d2", "d3"), fleet.workers["d3"]
    until(fleet, "d3", KvFetch)
    for _ in range(40):
        if not has_ended(leaver):
            fleet.clock.now += QUIET_S / 4
            fleet.round()
    assert has_ended(leaver)
    assert taker.counter(Count.TAKEN_BLOCKS) == 40


@pytest.mark.parametrize("takers", [(), ("d3",)])
def test_an_empty_cache_or_nobody_to_take_it_holds_nothing_up(
    fleet: WorkerFleet, takers: tuple[str, ...]
) -> None:
    if not takers:
        talk(fleet, "one", prompt_of(1, 5))
    leaver = drain(fleet, "d2", *takers)
    fleet.round()
    assert has_ended(leaver)


def test_a_holder_that_dies_in_the_middle_leaves_what_arrived(fleet: WorkerFleet) -> None:
    talk(fleet, "one", prompt_of(1, 5))
    drain(fleet, "d2", "d3")
    until(fleet, "d3", KvFetch)
    fleet.kill("d2")
    fleet.round()
    taker = fleet.workers["d3"]
    assert taker.scheduler.blocks.num_pinned > 0, "it may still write"
    fleet.check_blocks()
    fleet.clock.now += LANDING_S
    fleet.round()
    assert taker.scheduler.blocks.num_pinned == 0
    assert taker.counter(Count.FETCHES_LEFT) == 0


def test_a_taker_that_drains_itself_takes_no_more(fleet: WorkerFleet) -> None:
    talk(fleet, "one", prompt_of(1, 5))
    leaver = drain(fleet, "d2", "d3")
    until(fleet, "d3", KvFetch)
    taker = drain(fleet, "d3")
    taker.peers.others.clear()
    for _ in range(4):
        fleet.round()
        fleet.check_blocks()
    assert has_ended(leaver), "it need not wait for a quiet taker"
    assert has_ended(taker)


def test_two_workers_that_drain_at_once_wait_for_neither(fleet: WorkerFleet) -> None:
    both = ["d2", "d3"]
    for name in both:
        talk(fleet, f"on {name}", prompt_of(1, 5), name)
    leavers = [drain(fleet, "d2", "d3"), drain(fleet, "d3", "d2")]
    for _ in range(4):
        fleet.round()
    assert all(has_ended(each) for each in leavers)
    assert [each.counter(Count.TAKEN_BLOCKS) for each in leavers] == [0, 0]


def test_a_taker_that_has_left_the_fleet_is_not_waited_for(fleet: WorkerFleet) -> None:
    talk(fleet, "one", prompt_of(1, 5))
    leaver = drain(fleet, "d2", "d3")
    fleet.frozen.add("d3")
    fleet.round()
    leaver.peers.others.clear()
    fleet.clock.now += 0.3
    fleet.round()
    assert has_ended(leaver)
    fleet.frozen.clear()
    fleet.round()


def test_what_ends_during_the_drain_moves_too(fleet: WorkerFleet) -> None:
    prompt = prompt_of(1, 5)
    request = Request("runs", fleet.routers[0], prompt, 12, 0, False)
    fleet.ask(request, None, "d2")
    fleet.round()
    leaver = drain(fleet, "d2", "d3")
    run_until_ended(fleet, leaver)
    assert request.outcome == "done"
    assert fleet.workers["d3"].counter(Count.TAKEN_BLOCKS) >= 5


def test_a_drain_that_is_taken_back_takes_the_offer_back(fleet: WorkerFleet) -> None:
    for first in range(1, 4):
        talk(fleet, f"r{first}", prompt_of(first, 6))
    leaver = drain(fleet, "d2", "d3")
    until(fleet, "d3", CacheAsk)
    leaver.host.lifecycle.is_draining = False
    leaver.stop.since = None
    for _ in range(30):
        fleet.round()
    assert fleet.workers["d3"].counter(Count.TAKEN_BLOCKS) < 18
    assert fleet.is_idle()


def test_a_fleet_that_has_not_heard_of_the_drain_may_still_have_takers(fleet: WorkerFleet) -> None:
    """The view of the fleet is older than the drain, so who could take is not known yet."""
    talk(fleet, "one", prompt_of(1, 5))
    leaver = drain(fleet, "d2")
    leaver.peers.is_seen_to_drain = False
    fleet.round()
    assert not has_ended(leaver)
    drain(fleet, "d2", "d3")
    leaver.peers.is_seen_to_drain = True
    run_until_ended(fleet, leaver)
    assert fleet.workers["d3"].counter(Count.TAKEN_BLOCKS) == 5


def test_the_fleet_is_not_read_again_at_every_turn(fleet: WorkerFleet) -> None:
    """The announcement of the drain reads it, as soon as the store answers."""
    talk(fleet, "one", prompt_of(1, 5))
    leaver = drain(fleet, "d2", "d3")
    fleet.frozen.add("d3")
    for is_seen, num_looks in ((False, 0), (True, 1)):
        leaver.peers.is_seen_to_drain = is_seen
        for _ in range(5):
            fleet.round()
        assert leaver.peers.num_looks == num_looks
    fleet.frozen.clear()
    run_until_ended(fleet, leaver)


def test_a_store_that_is_away_holds_nothing_up(fleet: WorkerFleet) -> None:
    talk(fleet, "one", prompt_of(1, 5))
    leaver = drain(fleet, "d2")
    leaver.peers.is_seen_to_drain = False
    fleet.round()
    fleet.clock.now += QUIET_S
    fleet.round()
    assert has_ended(leaver)


def test_a_stranger_gets_and_gives_nothing(fleet: WorkerFleet) -> None:
    talk(fleet, "one", prompt_of(1, 5))
    d2, d3 = fleet.workers["d2"], fleet.workers["d3"]
    d2.server.inbox.append((d3.as_peer, CacheAsk(num_blocks=9)))
    d2.server.inbox.append((d3.as_peer, CacheOffer()))
    d2.peers.inbox.append(("d3-i", CachedPrefix(hashes=[b"made up"])))
    fleet.turn("d2")
    (answer,) = (m for m in fleet.channels["answers of d2", "d3"] if isinstance(m, CachedPrefix))
    assert answer.hashes == []
    assert d2.counter(Count.UNEXPECTED_MESSAGES) == 1
    fleet.channels.clear()


def test_a_taker_whose_view_of_the_fleet_is_older_than_the_offer_looks_again(
    fleet: WorkerFleet,
) -> None:
    talk(fleet, "one", prompt_of(1, 5))
    leaver = drain(fleet, "d2", "d3")
    taker = fleet.workers["d3"]
    known, taker.peers.others = taker.peers.others, []
    for _ in range(3):
        fleet.round()
    taker.peers.others = known
    run_until_ended(fleet, leaver)
    assert taker.counter(Count.TAKEN_BLOCKS) == 5


def test_a_cache_that_cannot_move_is_offered_to_nobody_with_one_line(
    fleet: WorkerFleet, caplog: pytest.LogCaptureFixture
) -> None:
    talk(fleet, "one", prompt_of(1, 5))
    engine = fleet.workers["d2"].engine
    engine.layout = msgspec.structs.replace(engine.layout, grouping=(KvGroup((0,), 9),))
    caplog.set_level(logging.INFO, "worker.inbound.leaving_cache")
    run_until_ended(fleet, drain(fleet, "d2", "d3"))
    line = "no worker is offered the cached blocks: all layers keep windows"
    assert caplog.messages == [line]
