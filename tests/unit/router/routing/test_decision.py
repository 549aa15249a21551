"""Decisions over a fleet's view: no sockets, no clock, no tasks."""

from __future__ import annotations

import random

import pytest

from protocol.events import CacheEvents, WorkerStats
from protocol.messages import CacheDump, Role
from protocol.registration import WorkerInfo, WorkerState
from router.routing.cache_index import CacheIndex
from router.routing.decision import Query, apply, decide
from router.routing.fleet_view import FleetView
from router.routing.view import Mode
from router.routing.worker_view import Liveness, WorkerView

BLOCK = 16
HASHES = [number.to_bytes(16, "big") for number in range(32)]


def worker(worker_id: str, liveness: Liveness = Liveness.ANSWERS) -> WorkerView:
    """Its id begins with its role's letter."""
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    info = WorkerInfo(
        worker_id=worker_id, incarnation=f"{worker_id}-1", role=role, state=WorkerState.READY,
        host="", pid=1, control="", events="", protocol_version=0, model="", model_fingerprint="",
        layout_fingerprint="", transport="", block_size=BLOCK, num_blocks=100, max_context=10_000,
    )  # fmt: skip
    return WorkerView(info, liveness)


def view_of(*workers: WorkerView) -> FleetView:
    view = FleetView(CacheIndex(10.0))
    for each in workers:
        view.join(each)
    return view


def stats(worker_id: str, **fields) -> WorkerStats:
    known = {"num_waiting": 0, "num_running": 0, "queued_tokens": 0, "blocks_total": 100}
    known |= {"blocks_used": 0, "blocks_cached": 0}
    return WorkerStats(worker_id=worker_id, incarnation=f"{worker_id}-1", **(known | fields))


def query(num_tokens: int = 512, **fields) -> Query:
    known = {"max_tokens": num_tokens + 1, "block_size": BLOCK, "hashes": HASHES}
    return Query(num_tokens=num_tokens, **(known | fields))


def test_a_decision_changes_nothing_and_applying_it_reserves_its_load() -> None:
    d1, p1 = worker("d1"), worker("p1")
    view = view_of(d1, p1)
    before = view.version
    decision = decide(view, query(), 0.0, random.Random(0))
    assert decision.placement.mode is Mode.REMOTE
    assert view.version == decision.version == before
    charged = apply(view, decision, 0.0)
    assert view.version > before
    assert [owner for owner, _ in charged] == [d1, p1]
    assert (d1.queued_tokens, p1.queued_tokens) == (0, 512)
    assert view.matches(HASHES, 0.0)["p1"].expected == 32
    assert view.matches(HASHES, 11.0) == {}, "expectations end"
    for owner, reservation in charged:
        owner.release(reservation)
    assert p1.queued_tokens == 0


def test_what_was_applied_counts_in_the_next_decision() -> None:
    view = view_of(worker("d1"), worker("d2"))
    other = [each[::-1] for each in HASHES]
    chosen = set()
    for hashes in (HASHES, other):
        decision = decide(view, query(hashes=hashes), 0.0, random.Random(0))
        apply(view, decision, 0.0)
        chosen.add(decision.placement.decode.worker_id)
    assert chosen == {"d1", "d2"}


def test_equal_views_give_equal_decisions() -> None:
    def choose(seed: int) -> list[str]:
        view, rng = view_of(*(worker(f"d{number}") for number in range(8))), random.Random(seed)
        return [decide(view, query(), 0.0, rng).placement.decode.worker_id for _ in range(8)]

    assert choose(1) == choose(1)
    assert len(set(choose(1))) > 1


def test_every_change_that_a_decision_can_see_is_a_new_version() -> None:
    d1 = worker("d1")
    view = view_of(d1)
    events = CacheEvents(worker_id="d1", incarnation="d1-1", seq=1, stored=HASHES, removed=[])
    dump = CacheDump(incarnation="d1-1", seq=0, hashes=[])
    seen = [view.version]
    for change in (
        lambda: d1.take_stats(stats("d1", num_running=1)),
        lambda: d1.note_liveness(Liveness.SILENT),
        lambda: view.index.apply_dump("d1", dump),
        lambda: view.index.apply_events(events),
        lambda: view.join(worker("d2")),
        lambda: view.leave("d2"),
    ):
        change()
        seen.append(view.version)
    assert seen == sorted(set(seen))
    d1.note_liveness(Liveness.SILENT)
    assert view.version == seen[-1], "nothing has changed"


@pytest.mark.parametrize(
    ("prefill", "decode", "ready"),
    [
        (("ANSWERS", "SLOW"), ("ANSWERS", "SILENT"), {"p1", "d1"}),
        (("SLOW", "SILENT"), ("SILENT", "SILENT"), {"p1", "d1", "d2"}),
        (("UNCONNECTED", "UNCONNECTED"), ("UNCONNECTED", "ANSWERS"), {"d2"}),
    ],
)
def test_who_is_ready_by_what_the_connections_show(prefill, decode, ready) -> None:
    workers = [worker(f"p{n}", Liveness[each]) for n, each in enumerate(prefill, 1)]
    workers += [worker(f"d{n}", Liveness[each]) for n, each in enumerate(decode, 1)]
    view = view_of(*workers)
    found = view.ready(Role.PREFILL) + view.ready(Role.DECODE)
    assert {each.worker_id for each in found} == ready
