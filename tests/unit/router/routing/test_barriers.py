"""Pairs that cannot hand over: what is known of them, when it is forgotten, and how requests are
placed around them."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Role
from protocol.registration import WorkerInfo
from router.routing.barriers import Barriers
from router.routing.caches.cache_index import CacheIndex
from router.routing.decision import Decision, Query, apply, decide
from router.routing.fleet_view import FleetView
from router.routing.placement import Mode, Rule, Targets
from router.routing.worker_view import Liveness, WorkerView
from tests.registration import registration
from tests.unit.router.routing.test_decision import query, stats

REFUSED = "it compares digests"


def info(worker_id: str, transport: str = "shm", life: int = 1, **fields) -> WorkerInfo:
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    known = {"num_blocks": 100, "max_context": 10_000} | fields
    return registration(worker_id, f"{worker_id}-{life}", role=role, transport=transport, **known)


def view_of(*infos: WorkerInfo) -> FleetView:
    view = FleetView(CacheIndex(10.0))
    for each in infos:
        view.join(WorkerView(each, Liveness.ANSWERS))
    return view


def refuse(view: FleetView, sink: str, *sources: str) -> None:
    """The sink reports that these incarnations refuse its pool, and no others."""
    worker = view.worker(sink)
    assert worker is not None
    view.take_stats(worker, stats(sink, refused_by=dict.fromkeys(sources, REFUSED)))


def placed(view: FleetView, seed: int = 0, **fields) -> Decision:
    asked: Query = query(**fields)
    decision = decide(view, asked, 0.0, random.Random(seed))
    assert decide(view, asked, 0.0, random.Random(seed)) == decision
    return decision


def pairs_used(view: FleetView, **fields) -> set[tuple[str | None, str]]:
    """Of many requests, each with the load of the former ones."""
    used = set()
    for number in range(60):
        hashes = [bytes([number, index]) for index in range(8)]
        decision = placed(view, number, hashes=hashes, **fields)
        apply(view, decision, 0.0)
        placement = decision.placement
        prefill = None if placement.prefill is None else placement.prefill.worker_id
        used.add((prefill, placement.decode.worker_id))
    return used


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("more", [{}, {"by_load": True}, {"targets": Targets(1e6, 1e6)}])
def test_only_possible_pairs_are_used_and_all_of_them(measured: bool, more: dict) -> None:
    view = view_of(info("p1"), info("p2", "nixl"), info("d1"), info("d2", "nixl"))
    if measured:
        view.pairs.observe("p1", "d1", 10, 1.0)
    assert pairs_used(view, **more) == {("p1", "d1"), ("p2", "d2")}


def test_among_many_the_cheapest_of_one_kind_do_not_hide_the_only_pairs_of_another() -> None:
    """The eight cheapest prefill workers and the eight cheapest decode workers have no pair."""
    infos = [info(f"p{i}") for i in range(12)] + [info(f"d{i}", "nixl") for i in range(12)]
    view = view_of(*infos, info("p-nixl", "nixl"), info("d-shm"))
    for busy in ("p-nixl", "d-shm"):
        worker = view.worker(busy)
        assert worker is not None
        worker.reserve(2000, 10)
    view.pairs.observe("p-nixl", "d1", 10, 1.0)
    placement = placed(view).placement
    assert placement.prefill is not None
    assert (placement.prefill.worker_id == "p-nixl") != (placement.decode.worker_id == "d-shm")


def test_without_a_possible_pair_the_request_is_local_and_says_why() -> None:
    view = view_of(info("p1", "nixl"), info("p2", "nixl"), info("d1"))
    placement = placed(view).placement
    assert (placement.mode, placement.rule) == (Mode.LOCAL, Rule.APART)
    assert placement.reason == (
        "local: no prefill worker can hand over to d1 (p1: its transport is nixl, not shm; "
        "p2: its transport is nixl, not shm)"
    )
    assert placement.prefill_candidates == ()
    assert placement.left_out == (
        "2 pairs cannot hand over, such as p1 to d1: its transport is nixl, not shm"
    )


def test_a_decode_worker_without_a_partner_computes_prompts_that_others_hand_over() -> None:
    view = view_of(info("p1"), info("d1"), info("d2", "nixl"))
    assert pairs_used(view) == {("p1", "d1"), (None, "d2")}
    only = placed(view, only=frozenset({"p1", "d2"})).placement
    assert (only.rule, only.decode.worker_id) == (Rule.APART, "d2")


def test_a_threshold_still_keeps_long_prompts_from_decode_workers() -> None:
    view = view_of(info("p1"), info("d1"), info("d2", "nixl"))
    assert pairs_used(view, local_threshold_tokens=64) == {("p1", "d1")}


def test_a_refusal_holds_until_one_of_the_two_is_another_process() -> None:
    view = view_of(info("p1"), info("d1"))
    assert placed(view).placement.left_out == ""
    refuse(view, "d1", "p1-1", "another-1")
    placement = placed(view).placement
    assert placement.rule is Rule.APART
    assert placement.reason.endswith(f"(p1: {REFUSED})")
    view.leave("p1")
    view.join(WorkerView(info("p1", life=2), Liveness.ANSWERS))
    refuse(view, "d1", "p1-1")  # its report may still name the former process
    assert placed(view).placement.mode is Mode.REMOTE
    refuse(view, "d1", "p1-2")
    assert placed(view).placement.mode is Mode.LOCAL
    view.leave("d1")
    view.join(WorkerView(info("d1", life=2), Liveness.ANSWERS))
    assert placed(view).placement.mode is Mode.REMOTE


def test_a_refusal_that_is_no_longer_reported_is_over() -> None:
    view = view_of(info("p1"), info("d1"))
    refuse(view, "d1", "p1-1")
    refuse(view, "d1")
    assert placed(view).placement.mode is Mode.REMOTE


def test_a_registration_with_other_facts_counts_at_once() -> None:
    view = view_of(info("p1", "nixl"), info("d1"))
    assert placed(view).placement.mode is Mode.LOCAL
    worker = view.worker("p1")
    assert worker is not None
    worker.renew(msgspec.structs.replace(worker.info, transport="shm"))
    assert placed(view).placement.mode is Mode.REMOTE


def test_a_handover_goes_to_a_worker_that_its_source_can_write_to() -> None:
    view = view_of(info("d0"), info("d1", "nixl"), info("d2"))
    chosen = {placed(view, seed, source="d0").placement.decode.worker_id for seed in range(20)}
    assert "d1" not in chosen


def test_the_retry_of_a_refused_pair_keeps_its_decode_worker_where_another_can_hand_over() -> None:
    view = view_of(info("p1"), info("p2"), info("p3", "nixl"), info("d1"), info("d2", "nixl"))
    refuse(view, "d1", "p1-1")
    placement = placed(view, prefer_decode="d1", failed=frozenset({"p1-1"})).placement
    assert placement.prefill is not None
    assert (placement.prefill.worker_id, placement.decode.worker_id) == ("p2", "d1")


WORKERS = [f"{role}{i}" for role in "pd" for i in range(4)]


@given(
    transports=st.lists(st.sampled_from(["shm", "nixl"]), min_size=8, max_size=8),
    refused=st.sets(st.tuples(st.sampled_from(WORKERS[:4]), st.sampled_from(WORKERS[4:]))),
    gone=st.sets(st.sampled_from(WORKERS)),
    order=st.permutations(WORKERS),
    measured=st.booleans(),
)
def test_no_impossible_pair_is_ever_chosen(transports, refused, gone, order, measured) -> None:
    """Whatever the order in which workers join, refuse and leave."""
    of = dict(zip(WORKERS, transports, strict=True))
    view = view_of(*(info(each, of[each]) for each in order))
    for sink in WORKERS[4:]:
        refuse(view, sink, *(f"{p}-1" for p, d in refused if d == sink))
    if measured:
        view.pairs.observe("p0", "d0", 10, 1.0)
    for each in gone:
        view.leave(each)
    left = [each for each in order if each not in gone]
    sources, sinks = ([e for e in left if e[0] == role] for role in "pd")
    able = {
        (p, d) for p, d in itertools.product(sources, sinks)
        if of[p] == of[d] and (p, d) not in refused
    }  # fmt: skip
    listed = {(each.source, each.sink) for each in view.pairs.barriers.pairs()}
    assert listed == set(itertools.product(sources, sinks)) - able
    if not sinks:
        return
    placement = placed(view, hashes=()).placement
    if placement.prefill is not None:
        assert (placement.prefill.worker_id, placement.decode.worker_id) in able
    else:
        assert not any(sink == placement.decode.worker_id for _, sink in able)
    assert bool(placement.left_out) == (len(listed) > 0)


def test_nothing_is_kept_of_a_fleet_that_left() -> None:
    barriers = Barriers()
    barriers.take(info("p1", "nixl"))
    barriers.take(info("d1"))
    barriers.take_refusals("d1", {"p1-1": REFUSED})
    assert barriers
    for each in ("p1", "d1", "never"):
        barriers.forget(each)
    assert not barriers
    assert barriers.text == ""
    assert not any([barriers._infos, barriers._facts, barriers._refusals, barriers._rows])
