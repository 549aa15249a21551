"""A pool that a source cannot write to, even over a second connection: the sink introduces the pool
under another name, and blocks that were granted before keep their fence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.handoff_messages import KvGrant, PeerDescriptor, PoolUnreachable
from tests.unit.fake_model import BLOCK
from tests.unit.worker_fleet import Request, WorkerFleet
from tests.unit.worker_harness import LANDING_S, Bench

PROMPT = [5 * i % 13 for i in range(4 * BLOCK + 1)]


@pytest.fixture
def fleet() -> Iterator[WorkerFleet]:
    made = WorkerFleet((1, 1, 1), (64, 64))
    made.is_calm = False
    yield made
    for bench in made.workers.values():
        assert bench.scheduler.blocks.num_pinned == 0, bench.name
        assert bench.sink.num_open == 0
    made.close()


@pytest.fixture
def p(fleet: WorkerFleet) -> Bench:
    return fleet.workers["p1"]


@pytest.fixture
def d(fleet: WorkerFleet) -> Bench:
    return fleet.workers["d2"]


def ask(fleet: WorkerFleet, number: int) -> Request:
    """A new prompt, computed by the prefill worker for the decode worker."""
    prompt = [number, *PROMPT]
    request = Request(f"r{number}", fleet.routers[0], prompt, 2, 0, False)
    fleet.ask(request, "p1", "d2")
    return request


def until_writes(fleet: WorkerFleet, source: Bench) -> None:
    """Everything goes on until the source writes."""
    for _ in range(30):
        if source.transfers.writes:
            return
        for ends in fleet.busy_channels():
            fleet.deliver(ends, 99)
        for name in list(fleet.workers):
            fleet.turn(name)
        fleet.compile(99)
    raise AssertionError("nothing is written")


def finish(fleet: WorkerFleet) -> None:
    """Everything goes on until all requests are over and their fences have fallen."""
    for _ in range(60):
        if fleet.is_idle():
            break
        fleet.round()
        fleet.check_blocks()
        if fleet.awaits_landing:
            fleet.clock.now += LANDING_S
    assert all(each.outcome == "done" for each in fleet.requests.values()), fleet.describe()


def fail_a_handoff(
    fleet: WorkerFleet, p: Bench, d: Bench, number: int, is_mismatch: bool = False
) -> Request:
    """A request whose blocks cannot be written at the first attempt."""
    request = ask(fleet, number)
    until_writes(fleet, p)
    p.transfers.break_way(d.transfers.agent, is_mismatch)
    fleet.turn("p1")
    return request


def sent(fleet: WorkerFleet, kind: type) -> list[object]:
    return [each for queue in fleet.channels.values() for each in queue if isinstance(each, kind)]


def test_one_failure_is_not_the_pool_s(fleet: WorkerFleet, p: Bench, d: Bench) -> None:
    d.transfers.spares = ["another end"]
    fail_a_handoff(fleet, p, d, 1)
    assert sent(fleet, PoolUnreachable) == []
    ask(fleet, 2)
    finish(fleet)
    fail_a_handoff(fleet, p, d, 3)
    assert sent(fleet, PoolUnreachable) == [], "blocks were written in between"
    finish(fleet)
    assert d.peers.introduced == {}


def test_a_pool_that_does_not_fit_gets_no_other_end(fleet: WorkerFleet, p: Bench, d: Bench) -> None:
    d.transfers.spares = ["another end"]
    for number in (1, 2, 3):
        fail_a_handoff(fleet, p, d, number, is_mismatch=True)
        assert sent(fleet, PoolUnreachable) == []
    finish(fleet)
    assert d.peers.introduced == {}
    assert d.peers.refusals == {"p1-i": "the way is broken"}, "routers pair it with others"


def test_at_the_second_the_sink_gives_another_end(fleet: WorkerFleet, p: Bench, d: Bench) -> None:
    former = d.transfers.agent
    d.transfers.spares = ["another end"]
    requests = [fail_a_handoff(fleet, p, d, number) for number in (1, 2)]
    assert sent(fleet, PoolUnreachable) == [PoolUnreachable(agent=former)]
    finish(fleet)
    assert [each.outcome for each in requests] == ["done", "done"]
    assert d.peers.introduced["p1-i"].agent == "another end"
    assert p.transfers.peers == {"another end"}, "the former one is removed"
    ask(fleet, 3)
    until_writes(fleet, p)
    assert {write.agent for write in p.transfers.writes} == {"another end"}
    finish(fleet)
    assert d.transfers.retired == [], "other peers may write to it"


def test_what_waits_for_its_turn_goes_on_under_the_new_name(
    fleet: WorkerFleet, p: Bench, d: Bench
) -> None:
    """An ask is no grant: the request need not fail."""
    former = d.transfers.agent
    d.transfers.spares = ["another end"]
    fail_a_handoff(fleet, p, d, 1)
    fail_a_handoff(fleet, p, d, 2)
    d.peers.introduced.clear()
    third = ask(fleet, 3)
    finish(fleet)
    assert (third.outcome, third.num_failures) == ("done", 0)
    assert former not in p.transfers.peers


def test_without_another_end_requests_go_another_way(
    fleet: WorkerFleet, p: Bench, d: Bench
) -> None:
    fail_a_handoff(fleet, p, d, 1)
    fail_a_handoff(fleet, p, d, 2)
    finish(fleet)
    assert d.peers.introduced == {}
    assert sent(fleet, PeerDescriptor) == sent(fleet, KvGrant) == []
