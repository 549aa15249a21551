"""What routers tell each other counts until the worker's own reports count it."""

from __future__ import annotations

import random

import msgspec
import pytest

from router.routing.decision import Charge, apply, decide
from router.routing.fleet_view import FleetView
from router.routing.sent_requests import (
    MOST_REQUESTS,
    SentRequest,
    SentRequests,
    decode,
    encode,
)
from router.routing.worker_view import WorkerView
from tests.unit.router.routing.test_decision import query, stats, view_of, worker

NAMES = ("d1", "p1", "p2")


class Router:
    """A router's view of the fleet, and what it has sent; `name` is its session everywhere."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.view: FleetView = view_of(*map(worker, NAMES))
        self.num_sent = dict.fromkeys(NAMES, 0)

    def place(self) -> list[Charge]:
        """Send a request for 512 tokens."""
        charges = apply(self.view, decide(self.view, query(), 0.0, random.Random(0)), 0.0)
        for owner, reservation in charges:
            if isinstance(owner, WorkerView):
                self.num_sent[owner.worker_id] += 1
                owner.note_sent(reservation, self.name, self.num_sent[owner.worker_id])
        return charges

    def worker(self, name: str) -> WorkerView:
        found = self.view.worker(name)
        assert found is not None
        return found

    @property
    def queued(self) -> list[int]:
        """The tokens that count as waiting on each prefill worker, in order of their number."""
        loads = self.view.loads([self.worker("p1"), self.worker("p2")])
        return sorted(each.queued_tokens for each in loads)

    def report(self, *routers: Router) -> None:
        """Every worker reports what it has received of these routers: all that they have sent."""
        for name in NAMES:
            received = {each.name: each.num_sent[name] for each in routers}
            self.view.take_stats(self.worker(name), stats(name, received=received))


def told(sender: Router, *receivers: Router) -> bytes:
    """A message with what the sender has sent, which the receivers take."""
    message = encode(sender.view.newly_sent())
    for each in receivers:
        each.view.reserve_for_others(decode(message))
    return message


def test_a_router_sees_what_another_has_sent_and_goes_elsewhere() -> None:
    one, other = Router("one"), Router("other")
    one.place()
    told(one, other)
    assert other.queued == one.queued == [0, 512]
    other.place()
    told(other, one)
    assert other.queued == one.queued == [512, 512]


def test_everything_is_told_once() -> None:
    router = Router("one")
    assert router.view.newly_sent() == []
    router.place()
    assert len(router.view.newly_sent()) == 2, "a prefill and a decode worker"
    assert router.view.newly_sent() == []
    router.place()
    computing = [each for each in router.view.newly_sent() if each.worker_id != "d1"]
    assert [len(each.requests) for each in computing] == [1]


def test_what_a_report_counts_or_is_over_is_not_listed() -> None:
    router = Router("one")
    for owner, reservation in router.place():
        owner.release(reservation)
    router.place()
    decoding = next(each for each in router.view.newly_sent() if each.worker_id == "d1")
    assert (decoding.first, decoding.last) == (1, 2)
    assert [each.number for each in decoding.requests] == [2]


def test_the_workers_own_report_ends_the_reservation() -> None:
    one, other = Router("one"), Router("other")
    one.place()
    told(one, other)
    other.report(one)
    assert other.queued == [0, 0], "the report has the load itself"
    assert [each.num_reservations for each in map(other.worker, NAMES)] == [0, 0, 0]


def test_a_late_message_counts_nothing_that_a_report_has_counted() -> None:
    one, other = Router("one"), Router("other")
    one.place()
    other.report(one)
    told(one, other)
    assert other.queued == [0, 0]


def test_a_doubled_message_counts_twice_until_the_report() -> None:
    one, other = Router("one"), Router("other")
    one.place()
    other.view.reserve_for_others(decode(told(one, other)))
    assert other.queued == [0, 1024]
    other.report(one)
    assert other.queued == [0, 0]


def test_a_request_that_never_arrives_ends_with_the_third_report() -> None:
    one, other = Router("one"), Router("other")
    one.place()
    told(one, other)
    for _ in range(2):
        other.report()
        assert other.queued == [0, 512]
    other.report()
    assert other.queued == [0, 0]


def test_own_reservations_end_with_their_requests_however_many_reports_come() -> None:
    router = Router("one")
    router.place()
    for _ in range(5):
        router.report()
    assert router.queued == [0, 512]


@pytest.mark.parametrize(("share_told", "others"), [(1.0, 0.0), (0.5, 1 / 3), (0.0, 1.0)])
def test_what_is_not_told_is_guessed(share_told: float, others: float) -> None:
    """Messages are lost, or the other router is of an earlier version and tells nothing."""
    one, other, rng = Router("one"), Router("other"), random.Random(0)
    for _ in range(400):
        one.place()
        other.place()
        told(one, *([other] if rng.random() < share_told else []))
        one.report(one, other)
        other.report(one, other)
    decide(other.view, query(), 0.0, random.Random(0))
    assert other.view.others_share == pytest.approx(others / (1 + others), abs=0.06)


def test_a_new_connection_counts_from_one_again() -> None:
    router = Router("one")
    d1 = router.worker("d1")
    for session in ("former", "new"):
        d1.note_sent(d1.reserve(0, 1), session, 1)
        found = d1.newly_sent()
        assert found is not None
        assert (found.session, found.first, found.last) == (session, 1, 1)


def test_a_message_lists_and_a_receiver_counts_a_bounded_number_of_requests() -> None:
    sender, receiver = Router("one").worker("d1"), Router("other").worker("d1")
    for number in range(1, MOST_REQUESTS + 3):
        sender.note_sent(sender.reserve(1, 0), "one", number)
    found = sender.newly_sent()
    assert found is not None
    assert (found.last, len(found.requests)) == (MOST_REQUESTS + 2, MOST_REQUESTS)
    for each in decode(encode([found, found])):
        receiver.reserve_for_others(each)
    assert receiver.num_reservations == MOST_REQUESTS


def test_messages_of_workers_that_are_not_here_are_ignored() -> None:
    one, other = Router("one"), Router("other")
    one.place()
    for name in NAMES:
        other.view.leave(name)
    told(one, other)
    assert not any(map(other.view.worker, NAMES))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        msgspec.msgpack.encode([["w", "s", 1, 1, [[1, -5, 0]]]]),
        msgspec.msgpack.encode([["w", "s", 1, 1, [[1, 2**40, 0]]]]),
        msgspec.msgpack.encode([["", "s", 1, 1, []]]),
    ],
)
def test_malformed_messages_are_no_load(message: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(message)


def test_a_later_version_may_add_fields() -> None:
    request = SentRequest(1, 512, 33)
    longer = msgspec.msgpack.encode([["p1", "one", 1, 1, [[1, 512, 33, "more"]], "more"]])
    assert decode(longer) == [SentRequests("p1", "one", 1, 1, [request])]
