"""Decisions over a fleet's view: no sockets, no clock, no tasks."""

from __future__ import annotations

import random

import msgspec
import pytest

from protocol.events import WorkerStats
from protocol.messages import Role
from protocol.registration import WorkerInfo, WorkerState
from router.routing.caches.cache_index import CacheIndex
from router.routing.decision import Query, apply, decide
from router.routing.fleet_view import FleetView
from router.routing.pace import HALF_LIFE_US
from router.routing.pairs import HALF_LIFE_S
from router.routing.placement import Mode, Targets
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
    before = view.loads([d1, p1])
    decision = decide(view, query(), 0.0, random.Random(0))
    assert decision.placement.mode is Mode.REMOTE
    assert view.loads([d1, p1]) == before
    assert view.matches(HASHES, 0.0) == {}
    charged = apply(view, decision, 0.0)
    assert view.loads([d1, p1]) != before
    pair = view.pairs.pair("p1", "d1")
    assert [owner for owner, _ in charged] == [d1, p1, pair]
    assert pair.blocks_under_way == 32
    assert (d1.queued_tokens, p1.queued_tokens) == (0, 512)
    assert view.matches(HASHES, 0.0)["p1"].expected == 32
    assert view.matches(HASHES, 11.0) == {}, "expectations end"
    for owner, reservation in charged:
        owner.release(reservation)
    assert (p1.queued_tokens, pair.blocks_under_way) == (0, 0)


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


def test_the_next_decision_sees_every_change_of_a_worker() -> None:
    d1 = worker("d1")
    view = view_of(d1)
    reservations = []

    def seen() -> tuple[object, ...]:
        return tuple(view.loads(view.ready(Role.DECODE)))

    last = seen()
    for change in (
        lambda: view.take_stats(d1, stats("d1", num_running=1)),
        lambda: reservations.append(d1.reserve(16, 1)),
        lambda: d1.release(reservations[0]),
        lambda: d1.renew(msgspec.structs.replace(d1.info, num_blocks=50)),
        lambda: d1.note_liveness(Liveness.UNCONNECTED),
        lambda: d1.note_liveness(Liveness.ANSWERS),
        lambda: d1.renew(msgspec.structs.replace(d1.info, state=WorkerState.DRAINING)),
        lambda: d1.renew(msgspec.structs.replace(d1.info, state=WorkerState.READY)),
        lambda: view.join(worker("d2")),
        lambda: view.leave("d2"),
    ):
        change()
        assert seen() != last
        last = seen()


def test_the_typical_speed_follows_the_reports() -> None:
    d1, d2 = worker("d1"), worker("d2")
    view = view_of(d1, d2)
    assert view.typical(Role.DECODE) is None
    for token_us in (50.0, 80.0):
        for each in (d1, d2):
            view.take_stats(each, stats(each.worker_id, step_per_token_us=token_us))
        typical = view.typical(Role.DECODE)
        assert typical is not None
        assert typical.per_token_us == token_us
    view.join(worker("d3"))
    view.leave("d2")
    d1.take_stats(stats("d1", step_per_token_us=90.0))
    view.leave("d3")
    typical = view.typical(Role.DECODE)
    assert typical is not None
    assert typical.per_token_us == 90.0, "another fleet has another typical worker"


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


def test_a_worker_that_has_a_part_already_is_kept_whatever_the_targets() -> None:
    d1, d2 = worker("d1"), worker("d2")
    d1.take_stats(stats("d1", num_running=20))
    view, targets = view_of(d1, d2, worker("p1")), Targets(1.0, 2.0)
    for seed in range(3):
        asked = query(prefer_decode="d1", targets=targets)
        decision = decide(view, asked, 0.0, random.Random(seed))
        assert decision.placement.decode.worker_id == "d1"


def test_a_pair_that_was_measured_to_be_slow_is_avoided() -> None:
    view = view_of(*map(worker, ("d1", "d2", "p1", "p2")))
    for source in ("p1", "p2"):
        for sink in ("d1", "d2"):
            slow = (source, sink) != ("p2", "d1")
            view.pairs.observe(source, sink, 10, 200.0 if slow else 1.0)
    for seed in range(5):
        placement = decide(view, query(), 0.0, random.Random(seed)).placement
        assert placement.prefill is not None
        assert (placement.prefill.worker_id, placement.decode.worker_id) == ("p2", "d1")


def test_a_pair_that_was_slow_once_is_tried_again() -> None:
    view = view_of(*map(worker, ("d1", "d2", "p1")))
    view.pairs.observe("p1", "d1", 10, 200.0)
    for _ in range(20):
        view.pairs.observe("p1", "d2", 10, 1.0)

    def sinks(now: float) -> set[str]:
        decisions = (decide(view, query(), now, random.Random(seed)) for seed in range(20))
        return {each.placement.decode.worker_id for each in decisions}

    assert sinks(0.0) == {"d2"}
    assert sinks(10 * HALF_LIFE_S) == {"d1", "d2"}


def test_what_is_under_way_between_two_workers_turns_the_next_prompt_away() -> None:
    view = view_of(*map(worker, ("d1", "p1", "p2")))
    for source in ("p1", "p2"):
        view.pairs.observe(source, "d1", 10, 10.0)
    view.pairs.pair("p1", "d1").reserve(500)
    placement = decide(view, query(), 0.0, random.Random(0)).placement
    assert placement.prefill is not None
    assert placement.prefill.worker_id == "p2"


def test_a_worker_that_reports_nothing_new_follows_the_typical_speed() -> None:
    d1, d2 = worker("d1"), worker("d2")
    view = view_of(d1, d2)
    for token_us in (100.0, 500.0):
        for _ in range(2):
            view.take_stats(d2, stats("d2", step_fixed_us=1.0, step_per_token_us=token_us))
        assert [each.pace.per_token_us for each in view.loads([d1])] == [token_us]


def test_a_worker_whose_speed_is_not_proven_counts_as_a_typical_one() -> None:
    """Its first guess, or an unlucky step, would draw every request, or none ever again."""
    proven = {"prefill_tokens": 10**6, "steps": 10**5, "step_us": 10**7}
    d1, d2, d3 = (worker(name) for name in ("d1", "d2", "d3"))
    for each in (d1, d2):
        each.take_stats(stats(each.worker_id, step_per_token_us=50.0, counters=proven))
    d3.take_stats(stats("d3", step_fixed_us=1000.0, step_per_token_us=9000.0))
    view = view_of(d1, d2, d3)

    def token_us() -> float:
        return view.loads([d3])[0].pace.per_token_us

    assert token_us() == 50.0
    d3.take_stats(stats("d3", step_per_token_us=9000.0, counters=proven, reported_us=1))
    assert token_us() == pytest.approx(9000.0, rel=0.01)
    slow = stats("d3", step_per_token_us=9000.0, counters=proven, reported_us=10 * HALF_LIFE_US)
    d3.take_stats(slow)
    assert token_us() < 100.0, "it was slow once, and has had no chance since"


def test_a_worker_that_joins_counts_as_typical_at_once() -> None:
    proven = {"prefill_tokens": 10**6, "steps": 10**5, "step_us": 10**7}
    d1, d2 = worker("d1"), worker("d2")
    d1.take_stats(stats("d1", step_per_token_us=50.0, counters=proven))
    view = view_of(d1)
    assert view.loads([d1])[0].pace.per_token_us == 50.0
    view.join(d2)
    assert view.loads([d2])[0].pace.per_token_us == 50.0


@pytest.mark.parametrize(
    ("error_us", "predicted_us", "is_proven"),
    [(50, 150, True), (90, 109, True), (90, 91, True), (90, 115, False), (90, 85, False)],
)
def test_a_step_model_is_proven_by_small_errors_or_by_errors_that_cancel_out(
    error_us: int, predicted_us: int, is_proven: bool
) -> None:
    counters = {"prefill_tokens": 10**6, "steps": 10**5, "step_us": 100}
    counters |= {"step_error_us": error_us, "predicted_step_us": predicted_us}
    d1 = worker("d1")
    d1.take_stats(stats("d1", step_per_token_us=50.0, counters=counters))
    assert d1.speed is not None
    assert (d1.speed.token_trust > 0.9, d1.speed.proven_tokens > 0) == (is_proven, is_proven)


def test_an_idle_prefill_pool_does_not_count_as_fast_as_the_decode_workers() -> None:
    """Pools may have other cards, so each has its own typical worker."""
    proven = {"prefill_tokens": 10**6, "steps": 10**5, "step_us": 10**7}
    workers = {name: worker(name) for name in ("d1", "d2", "d3", "p1", "p2")}
    for name, each in workers.items():
        token_us = 20.0 if each.is_prefill else 400.0
        for reported_us in (0, 0 if each.is_decode else 100 * HALF_LIFE_US):
            speed = {"step_per_token_us": token_us, "reported_us": reported_us}
            each.take_stats(stats(name, counters=proven, **speed))
    view = view_of(*workers.values())
    prefill, decode = ([workers[name] for name in names] for names in (("p1", "p2"), ("d1", "d3")))
    assert [each.pace.per_token_us for each in view.loads(prefill)] == [20.0, 20.0]
    found = [each.pace.per_token_us for each in view.loads(decode)]
    assert found == pytest.approx([400.0, 400.0])


def test_one_instants_equal_prompts_are_computed_once() -> None:
    """Sixteen samples of one prompt: one worker computes it; decode workers share the outputs."""
    view = view_of(*map(worker, ("d1", "d2", "d3", "p1", "p2")))
    rng, sources, sinks, computed = random.Random(0), set(), set(), 0
    hashes = [number.to_bytes(16, "big") for number in range(95)]
    for _ in range(16):
        decision = decide(view, query(1520, hashes=hashes), 0.0, rng)
        apply(view, decision, 0.0)
        prefill = decision.placement.prefill or decision.placement.decode
        sources.add(prefill.worker_id)
        sinks.add(decision.placement.decode.worker_id)
        computed += prefill.recompute_tokens
    assert len(sources) == 1
    assert len(sinks) > 1
    assert computed == 1520 + 15 * BLOCK, "of a known prompt, the last block is computed"
