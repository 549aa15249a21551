"""What other routers have sent, which a router cannot see, counts as far as it can be guessed."""

from __future__ import annotations

import random

import pytest

from router.routing.decision import apply, decide
from router.routing.fleet_view import FleetView
from router.routing.unseen_load import MOST_OTHERS, Arrivals, others_of
from router.routing.worker_view import WorkerView
from tests.unit.router.routing.test_decision import query, stats, view_of, worker

NAMES = ("d1", "p1", "p2")


def fleet(ours: int, theirs: int) -> FleetView:
    """A fleet whose workers have each received so many requests of ours and of another router."""
    view = view_of(*map(worker, NAMES))
    for number, received in enumerate([{"ours": 1}, {"ours": ours, "theirs": theirs}]):
        for name in NAMES:
            each = _worker(view, name)
            each.note_sent(each.reserve(0, 0), "ours", number)
            each.take_stats(stats(name, received=received))
    return view


def _worker(view: FleetView, name: str) -> WorkerView:
    found = view.worker(name)
    assert found is not None
    return found


def queued_after_one_more(view: FleetView) -> list[int]:
    """The tokens that wait on the prefill workers, the fullest first."""
    apply(view, decide(view, query(), 0.0, random.Random(0)), 0.0)
    loads = view.loads([_worker(view, name) for name in ("p1", "p2")])
    return sorted([each.queued_tokens for each in loads], reverse=True)


def test_alone_a_router_sees_all_requests() -> None:
    assert queued_after_one_more(fleet(ours=200, theirs=0)) == [512, 0]


def test_a_request_counts_for_those_that_others_have_sent_meanwhile() -> None:
    """Others send three requests for each of ours: some to the same worker, the rest anywhere."""
    fullest, other = queued_after_one_more(fleet(ours=50, theirs=150))
    assert fullest + other == pytest.approx(4 * 512, rel=0.1)
    assert fullest > 512 + other > 2 * 512


@pytest.mark.parametrize(("theirs", "share"), [(0, 0.0), (50, 0.5), (150, 0.75)])
def test_a_view_tells_the_part_of_requests_that_others_send(theirs: int, share: float) -> None:
    view = fleet(ours=50, theirs=theirs)
    decide(view, query(), 0.0, random.Random(0))
    assert view.others_share == pytest.approx(share, abs=0.01)


def test_the_share_follows_the_traffic() -> None:
    arrivals, received, others = Arrivals(), {"ours": 0, "theirs": 0}, []
    for ours, theirs in [(1, 0)] * 100 + [(1, 1)] * 300 + [(1, 0)] * 300:
        former = received
        received = {"ours": former["ours"] + ours, "theirs": former["theirs"] + theirs}
        arrivals.observe(former, received, "ours")
        others.append(others_of([arrivals]))
    assert others[99] == 0.0
    assert others[399] == pytest.approx(1.0, abs=0.05)
    assert others[699] < 0.1


def test_routers_that_come_and_go_are_no_traffic() -> None:
    arrivals = Arrivals()
    arrivals.observe({"ours": 5, "theirs": 900}, {"ours": 6}, "ours")
    assert others_of([arrivals]) == 0.0
    arrivals.observe({"ours": 6}, {"ours": 6, "new": 1}, "ours")
    assert 0.0 < others_of([arrivals]) < 1.0


def test_a_count_that_falls_back_leaves_the_estimate_as_it_was() -> None:
    arrivals = Arrivals()
    arrivals.observe({}, {"ours": 10, "theirs": 10}, "ours")
    former = others_of([arrivals])
    arrivals.observe({"ours": 10, "theirs": 10}, {"ours": 10, "theirs": 2}, "ours")
    assert others_of([arrivals]) == former > 0.0


def test_others_count_for_so_many_at_most() -> None:
    arrivals = Arrivals()
    arrivals.observe({}, {"theirs": 10_000}, "ours")
    assert others_of([arrivals]) == MOST_OTHERS


def test_a_request_that_a_message_named_is_known_when_it_arrives_later() -> None:
    arrivals = Arrivals()
    arrivals.note_told(1)
    arrivals.observe({}, {"ours": 1}, "ours")  # the named one has not arrived yet
    arrivals.observe({"ours": 1}, {"ours": 1, "theirs": 1}, "ours")
    assert others_of([arrivals]) == pytest.approx(0.0, abs=0.01)


def test_requests_that_never_arrive_do_not_hide_unknown_ones_for_long() -> None:
    arrivals, received = Arrivals(), {"ours": 0, "theirs": 0}
    arrivals.note_told(200)
    for _ in range(300):
        former, received = received, {name: count + 1 for name, count in received.items()}
        arrivals.observe(former, received, "ours")
    assert others_of([arrivals]) == pytest.approx(1.0, abs=0.1)
