"""What a fleet's view keeps between decisions is what it would find from scratch."""

from __future__ import annotations

import copy

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.messages import Role
from protocol.registration import WorkerState
from router.routing.caches.cache_index import CacheIndex
from router.routing.fleet_view import FleetView
from router.routing.placement import WorkerLoad
from router.routing.sent_requests import SentRequest, SentRequests
from router.routing.worker_view import Liveness, Reservation, WorkerView
from tests.effort import times
from tests.unit.router.routing.test_decision import stats, view_of, worker

NAMES = ("d1", "d2", "p1")
OURS, THEIRS, UNTOLD = "ours", "theirs", "untold"
changes = st.one_of(
    st.tuples(
        st.just("report"), st.integers(0, 3), st.integers(0, 400), st.sampled_from([50.0, 80.0])
    ),
    st.tuples(st.just("reserve"), st.integers(0, 500), st.integers(0, 40)),
    st.tuples(st.just("release")),
    st.tuples(st.just("hear"), st.integers(1, 500)),
    st.tuples(st.just("arrive"), st.integers(1, 9)),
    st.tuples(
        st.just("renew"),
        st.sampled_from(Role),
        st.sampled_from(WorkerState),
        st.integers(50, 200),
    ),
    st.tuples(st.just("connect"), st.sampled_from(Liveness)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("leave")),
)


class Changing:
    """A view whose workers change, and the numbers that they report."""

    def __init__(self) -> None:
        self.view = view_of(*map(worker, NAMES))
        self.received = {name: {OURS: 0, THEIRS: 0, UNTOLD: 0} for name in NAMES}
        self.sent: dict[str, list[Reservation]] = {name: [] for name in NAMES}

    @property
    def workers(self) -> list[WorkerView]:
        found = map(self.view.worker, NAMES)
        return [each for each in found if each is not None]

    def change(self, name: str, kind: str, *values) -> None:
        each = self.view.worker(name)
        if kind == "restart":
            if each is not None:
                self.view.leave(name)
            self.view.join(worker(name))
            return
        if each is None:
            return
        received, sent = self.received[name], self.sent[name]
        match kind, values:
            case "report", (running, queued, token_us):
                received[OURS] = each.num_reservations and len(sent)
                load = {"num_running": running, "queued_tokens": queued, "blocks_used": running}
                load |= {"step_per_token_us": token_us, "received": dict(received)}
                self.view.take_stats(each, stats(name, **load))
            case "reserve", (tokens, blocks):
                sent.append(each.reserve(tokens, blocks))
                each.note_sent(sent[-1], OURS, len(sent))
            case "release", () if sent:
                each.release(sent[-1])
            case "hear", (tokens,):
                received[THEIRS] += 1
                told = [SentRequest(received[THEIRS], tokens, 1)]
                sent_there = SentRequests(name, THEIRS, received[THEIRS], received[THEIRS], told)
                self.view.reserve_for_others([sent_there])
            case "arrive", (number,):
                received[UNTOLD] += number
            case "renew", (role, state, blocks):
                fields = {"role": role, "state": state, "num_blocks": blocks}
                each.renew(msgspec.structs.replace(each.info, **fields))
            case "connect", (liveness,):
                each.note_liveness(liveness)
            case "leave", ():
                self.view.leave(name)

    def pools_from_scratch(self) -> list[set[str]]:
        bare = FleetView(CacheIndex(10.0))
        for each in self.workers:
            bare.join(WorkerView(each.info, each.liveness))
        return names_of(bare)


def names_of(view: FleetView) -> list[set[str]]:
    return [{each.worker_id for each in pool} for pool in view.ready_pools()]


def loads_of(view: FleetView) -> list[list[WorkerLoad]]:
    return [view.loads(pool) for pool in view.ready_pools()]


def loads_from_scratch(view: FleetView) -> list[list[WorkerLoad]]:
    """Of a copy in which every worker forgets the load that it keeps."""
    other = copy.deepcopy(view)
    for each in map(other.worker, NAMES):
        if each is not None:
            each.assume(other.typical(each.role))
    return loads_of(other)


REPORT = ("report", 0, 0, 50.0)
STRANGERS_WORKER_LEAVES = [
    ("d2", REPORT), ("d2", ("arrive", 9)), ("d2", REPORT), ("d1", REPORT), ("p1", REPORT),
    ("d1", ("reserve", 100, 5)), ("d2", ("leave",)),
]  # fmt: skip
"""Requests of a router that tells nothing are guessed, until the worker that had them leaves."""


@settings(max_examples=times(40, 1000), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), changes), min_size=5, max_size=30))
@example([("d1", ("reserve", 100, 5)), ("d1", ("release",))])
@example(STRANGERS_WORKER_LEAVES)
def test_pools_and_loads_are_as_if_found_from_scratch(steps) -> None:
    changing = Changing()
    for name, (kind, *values) in steps:
        changing.change(name, kind, *values)
        assert names_of(changing.view) == changing.pools_from_scratch()
        expected = loads_from_scratch(changing.view)
        assert loads_of(changing.view) == expected, kind
