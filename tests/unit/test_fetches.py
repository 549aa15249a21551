"""Workers that fetch each other's cached blocks, with real schedulers and handoff machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.handoff_messages import KvClosed, KvFetch
from protocol.messages import Role
from scheduling import fetch_rule
from scheduling.sequence import SequenceState
from tests.unit.fake_model import BLOCK
from tests.unit.worker_fleet import Request, WorkerFleet
from tests.unit.worker_harness import LANDING_S, TTL_S
from worker.counters import Count
from worker.inbound import fetches as fetches_module

SHARED = [3 * i % 11 for i in range(5 * BLOCK + 1)]
Fleet = WorkerFleet


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerFleet]:
    monkeypatch.setattr(fetch_rule, "SLACK_S", 0.0)
    monkeypatch.setattr(fetches_module, "HOLDER_SHARE", 1.0)
    monkeypatch.setattr(fetches_module, "ALL_SHARE", 1.0)
    made = WorkerFleet((1, 2, 1), (64, 64))
    yield made
    for bench in made.workers.values():
        assert bench.scheduler.blocks.num_pinned == 0, bench.name
        assert bench.sink.num_open == 0
    made.close()


def ask(fleet: Fleet, name: str, p: str | None, d: str, holder: str = "", last: int = 0) -> Request:
    prompt = [*SHARED, last]
    request = Request(name, fleet.routers[0], prompt, 2, 0, False, holder=holder)
    fleet.ask(request, p, d)
    return request


def run(fleet: Fleet, *requests: Request, rounds: int = 60) -> None:
    for _ in range(rounds):
        if all(each.outcome for each in requests) and fleet.is_idle():
            break
        fleet.round()
        fleet.check_blocks()
    assert [each.outcome for each in requests] == ["done"] * len(requests), fleet.describe()


def warm(fleet: Fleet, d: str) -> None:
    run(fleet, ask(fleet, f"warm {d}", None, d))


def until(fleet: Fleet, name: str, kind: type) -> None:
    """Everything goes on until a message of this kind is on its way to or from a worker."""
    for _ in range(30):
        if any(
            isinstance(message, kind) for ends, queue in fleet.channels.items()
            if name in ends[0] for message in queue
        ):  # fmt: skip
            return
        for ends in fleet.busy_channels():
            fleet.deliver(ends, 99)
        for each in list(fleet.workers):
            fleet.turn(each)
    raise AssertionError(f"no {kind.__name__} from {name}")


@pytest.mark.parametrize("fetcher", ["p1", "d3"])
def test_what_another_worker_holds_is_fetched_and_only_the_rest_computed(
    fleet: Fleet, fetcher: str
) -> None:
    warm(fleet, "d2")
    p = "p1" if fetcher == "p1" else None
    run(fleet, ask(fleet, "r", p, "d3", holder="d2", last=1))
    bench = fleet.workers[fetcher]
    assert bench.counter(Count.FETCHED_TOKENS) == 5 * BLOCK
    assert bench.counter(Count.PREFILL_TOKENS) == 2
    assert fleet.workers["d2"].counter(Count.SERVED_BLOCKS) == 5


def test_what_a_holder_no_longer_has_is_computed(fleet: Fleet) -> None:
    warm(fleet, "d2")
    blocks = fleet.workers["d2"].scheduler.blocks
    taken = blocks.allocate(blocks.num_free - 3)
    blocks.release(taken)
    run(fleet, ask(fleet, "r", "p1", "d3", holder="d2", last=1))
    p = fleet.workers["p1"]
    assert p.counter(Count.FETCHED_TOKENS) == 3 * BLOCK
    assert p.counter(Count.PREFILL_TOKENS) == 2 * BLOCK + 2
    assert p.counter(Count.FETCH_MISSING_BLOCKS) == 2


def test_two_workers_fetch_from_each_other_at_once(fleet: Fleet) -> None:
    warm(fleet, "d2")
    other = Request("other", fleet.routers[0], [*SHARED[::-1], 1], 2, 0, False)
    fleet.ask(other, None, "d3")
    run(fleet, other)
    one = ask(fleet, "one", None, "d3", holder="d2", last=7)
    two = Request("two", fleet.routers[0], [*SHARED[::-1], 7], 2, 0, False, holder="d3")
    fleet.ask(two, None, "d2")
    run(fleet, one, two)
    for name in ("d2", "d3"):
        assert fleet.workers[name].counter(Count.FETCHED_TOKENS) == 5 * BLOCK


def test_twins_fetch_once(fleet: Fleet) -> None:
    warm(fleet, "d2")
    twins = [ask(fleet, f"r{i}", "p1", "d3", holder="d2", last=i) for i in range(4)]
    run(fleet, *twins)
    p = fleet.workers["p1"]
    assert p.counter(Count.FETCHES) == 1
    assert p.counter(Count.PREFILL_TOKENS) == 4 * 2


def test_nobody_hears_that_a_prompt_has_begun_before_its_fetch_is_over(fleet: Fleet) -> None:
    warm(fleet, "d2")
    ask(fleet, "r", "p1", "d3", holder="d2", last=1)
    until(fleet, "p1", KvFetch)
    for _ in range(5):
        fleet.turn("p1")
    (sequence,) = fleet.workers["p1"].scheduler.sequences
    assert sequence.state is SequenceState.FETCHING
    assert not fleet.workers["d3"].scheduler.sequences[0].source_has_begun
    run(fleet, fleet.requests["r"])


def test_a_holder_that_dies_in_mid_fetch_costs_time_only(fleet: Fleet) -> None:
    warm(fleet, "d2")
    ask(fleet, "r", "p1", "d3", holder="d2", last=1)
    until(fleet, "p1", KvFetch)
    fleet.kill("d2")
    fleet.round()
    assert fleet.workers["p1"].counter(Count.FETCHES_LEFT) == 1
    fleet.clock.now += LANDING_S
    run(fleet, fleet.requests["r"])
    assert fleet.workers["p1"].counter(Count.FETCHED_TOKENS) == 0


def test_a_holder_that_stands_still_is_left_alone_and_its_blocks_stay_fenced(fleet: Fleet) -> None:
    warm(fleet, "d2")
    ask(fleet, "r", "p1", "d3", holder="d2", last=1)
    until(fleet, "p1", KvFetch)
    fleet.frozen.add("d2")
    p = fleet.workers["p1"]
    for _ in range(8):
        fleet.clock.now += 0.25
        fleet.round()
    assert p.counter(Count.FETCHES_STOPPED) == p.counter(Count.FETCHES_LEFT) == 1
    for _ in range(20):
        fleet.round()
    assert fleet.requests["r"].outcome == "done"
    assert p.scheduler.blocks.num_pinned == 5
    fleet.notice_silence()
    fleet.turn("p1")
    assert p.role._inbound.num_stuck == 5  # type: ignore[attr-defined]
    fleet.frozen.clear()
    fleet.notice_silence()
    fleet.clock.now += TTL_S
    run(fleet, fleet.requests["r"])


def test_a_fetch_that_comes_after_its_abort_is_not_served(fleet: Fleet) -> None:
    warm(fleet, "d2")
    ask(fleet, "r", "p1", "d3", holder="d2", last=1)
    until(fleet, "p1", KvFetch)
    queue = fleet.channels["p1", "d2"]
    fetch = next(each for each in queue if isinstance(each, KvFetch))
    queue.remove(fetch)  # delayed
    fleet.abort(fleet.requests["r"])
    for _ in range(6):
        fleet.round()
    assert fleet.workers["p1"].scheduler.blocks.num_pinned == 0
    fleet.channels["p1", "d2"].append(fetch)
    fleet.round()
    assert fleet.workers["d2"].transfers.writes == []
    assert fleet.workers["d2"].counter(Count.SERVED_BLOCKS) == 0


def test_a_repeated_fetch_is_answered_and_not_served_again(fleet: Fleet) -> None:
    warm(fleet, "d2")
    ask(fleet, "r", "p1", "d3", holder="d2", last=1)
    until(fleet, "p1", KvFetch)
    fetch = next(e for e in fleet.channels["p1", "d2"] if isinstance(e, KvFetch))
    run(fleet, fleet.requests["r"])
    d = fleet.workers["d2"]
    d.server.inbox.append((fleet.workers["p1"].as_peer, fetch))
    d.worker.turn()  # type: ignore[attr-defined]
    (answer,) = d.take_sent()
    assert isinstance(answer, KvClosed)
    assert (answer.error, answer.num_blocks, answer.part) == ("", 5, 1)
    assert d.transfers.writes == []


def test_a_worker_that_drains_serves_and_does_not_fetch(fleet: Fleet) -> None:
    warm(fleet, "d2")
    fleet.workers["d2"].stop.request()
    fleet.turn("d2")
    run(fleet, ask(fleet, "r", "p1", "d3", holder="d2", last=1))
    assert fleet.workers["p1"].counter(Count.FETCHED_TOKENS) == 5 * BLOCK
    assert fleet.workers["p1"].as_peer.role is Role.PREFILL


@pytest.mark.parametrize("is_afar", [True, False])
def test_the_connections_of_a_holder_that_may_only_be_stopped_are_closed(
    fleet: Fleet, is_afar: bool
) -> None:
    """On another machine, what is silent and has no lease may go on later, in the middle of a
    write."""
    warm(fleet, "d2")
    ask(fleet, "r", "p1", "d3", holder="d2", last=1)
    until(fleet, "p1", KvFetch)
    p = fleet.workers["p1"]
    p.peers.lapsed = {"d2-i"} if is_afar else set()
    fleet.kill("d2")
    fleet.turn("p1")
    assert p.transfers.disconnected == ([{"10.0.0.2"}] if is_afar else [])
    assert p.scheduler.blocks.num_pinned > 0, "its fence still stands"
    fleet.clock.now += LANDING_S
    run(fleet, fleet.requests["r"])


def test_a_fence_stands_while_connections_are_being_closed(fleet: Fleet) -> None:
    """Another host of this worker stands still, and what it has not closed may still deliver."""
    warm(fleet, "d2")
    ask(fleet, "r", "p1", "d3", holder="d2", last=1)
    until(fleet, "p1", KvFetch)
    p = fleet.workers["p1"]
    p.peers.lapsed, p.transfers.is_disconnecting = {"d2-i"}, True
    fleet.kill("d2")
    for _ in range(3):
        fleet.turn("p1")
        fleet.clock.now += LANDING_S
    assert p.scheduler.blocks.num_pinned > 0
    p.transfers.is_disconnecting = False
    fleet.turn("p1")
    assert p.scheduler.blocks.num_pinned > 0, "what had arrived before may still land"
    fleet.clock.now += LANDING_S
    run(fleet, fleet.requests["r"])


def test_a_holder_that_lapses_without_a_grant_costs_no_connection(fleet: Fleet) -> None:
    warm(fleet, "d2")
    run(fleet, ask(fleet, "r", "p1", "d3", holder="d2", last=1))
    p = fleet.workers["p1"]
    p.peers.lapsed = {"d2-i"}
    fleet.kill("d2")
    fleet.turn("p1")
    assert p.transfers.disconnected == []
