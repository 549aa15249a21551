"""Placement by predicted milliseconds: local or remote, and on which workers."""

from __future__ import annotations

import pytest

from router.routing.costs import HANDOFF_MS
from router.routing.pairs import Pairs
from router.routing.placement import (
    HeldElsewhere,
    Mode,
    Placement,
    Rule,
    Targets,
)
from tests.unit.router.routing.placements import BLOCK, by_cost, decide, load


@pytest.mark.parametrize(
    ("num_tokens", "held", "requests", "mode"),
    [
        (500, 0, 0, Mode.REMOTE),  # nobody has a part of it
        (33, 0, 0, Mode.REMOTE),
        (32, 0, 0, Mode.LOCAL),  # not worth a handoff
        (1024, 60, 0, Mode.LOCAL),  # 64 tokens are new
        (1600, 80, 0, Mode.LOCAL),  # 320 are, and moving 1,280 costs more than they save
        (1600, 80, 20, Mode.REMOTE),  # ... but they would slow down 20 requests
        (1600, 10, 0, Mode.REMOTE),
    ],
)
def test_a_continuation_is_local_where_that_costs_least(num_tokens, held, requests, mode) -> None:
    decode = [load("d1", held, num_requests=requests), load("d2", num_requests=requests)]
    elsewhere = HeldElsewhere("d1", held, 0) if held else None
    placement = by_cost(num_tokens, decode, [load("p1")], elsewhere=elsewhere)
    assert placement.mode is mode
    if mode is Mode.LOCAL and held:
        assert (placement.decode.worker_id, placement.rule) == ("d1", Rule.NEAR)
        assert placement.reason.endswith("which cost least there")


def test_tokens_that_can_be_fetched_cost_little_so_load_decides() -> None:
    prefill = [load("p1", 60, queued_tokens=500), load("p2")]
    alone = by_cost(1000, [load("d1")], prefill)
    assert alone.prefill is not None
    assert alone.prefill.worker_id == "p1"
    fetching = by_cost(1000, [load("d1")], prefill, elsewhere=HeldElsewhere("p1", 60, 0))
    assert fetching.prefill is not None
    assert fetching.prefill.worker_id == "p2"
    assert fetching.prefill.fetch_tokens == 60 * BLOCK
    assert fetching.prefill.recompute_tokens == 1000


def test_a_decode_worker_that_holds_nothing_computes_what_no_pair_begins_in_time() -> None:
    decode, prefill = [load("d1"), load("d2", num_requests=8)], [load("p1", queued_tokens=20_000)]
    assert by_cost(1000, decode, prefill).mode is Mode.REMOTE
    spare = by_cost(1000, decode, prefill, targets=Targets(ttft_ms=500.0))
    assert (spare.mode, spare.rule, spare.decode.worker_id) == (Mode.LOCAL, Rule.SPARE, "d1")
    assert spare.meets_targets
    assert spare.reason.startswith("local: d1 gives the first token in time, after 6.25")
    assert spare.alternative is not None
    assert spare.alternative.prefill == "p1"
    assert decide(1000, decode, prefill, targets=Targets(ttft_ms=500.0)).mode is Mode.REMOTE
    hopeless = by_cost(1000, decode, prefill, targets=Targets(ttft_ms=50.0))
    assert (hopeless.mode, hopeless.meets_targets) == (Mode.REMOTE, False)


@pytest.mark.parametrize(
    ("queued", "busy", "mode"),
    [
        (1000, 0, Mode.REMOTE),
        (3000, 0, Mode.LOCAL),
        (3000, 2000, Mode.REMOTE),
        (0, 0, Mode.REMOTE),
    ],
    ids=["ample", "barely in time", "not much sooner", "no queue"],
)
def test_a_decode_worker_helps_before_pairs_are_late(queued: int, busy: int, mode: Mode) -> None:
    """A prompt takes 0.2 s, or 0.6 s without a queue; so many tokens wait for prefill or decode."""
    decode = [load("d1", queued_tokens=busy, num_requests=bool(busy))]
    prefill = [load("p1", queued_tokens=queued, num_requests=bool(queued))]
    length = 1000 if queued else 2900
    placed = by_cost(length, decode, prefill, targets=Targets(ttft_ms=1000.0))
    assert placed.mode is mode
    assert placed.meets_targets


def test_a_worker_that_holds_a_part_and_is_soon_enough_leaves_others_alone() -> None:
    """A prompt takes 0.2 s; an idle decode worker would be sooner, but not twice as soon."""
    decode = [load("d1", 2, queued_tokens=900, num_requests=1), load("d2")]
    prefill = [load("p1", queued_tokens=1200, num_requests=1)]
    placed = by_cost(1000, decode, prefill, targets=Targets(ttft_ms=500.0))
    assert (placed.rule, placed.decode.worker_id) == (Rule.NEAR, "d1")


def test_prompts_on_a_decode_worker_slow_what_is_handed_over_to_it() -> None:
    """A handoff waits for steps of 0.1 s there, for which a short output does not make up."""
    decode = [load("computing", queued_tokens=500, num_requests=1), load("busy", num_requests=150)]

    def placed(output: int) -> Placement:
        targets = Targets(1000.0, 45.0)
        return by_cost(
            400, decode, [load("p1")], max_tokens=600, output_tokens=output, targets=targets
        )

    short, long = placed(6), placed(100)
    assert (short.mode, short.decode.worker_id) == (Mode.REMOTE, "busy")
    slow, _ = short.decode_candidates
    assert slow.tpot_ms > 60
    assert long.decode.worker_id == "computing"
    assert long.decode.tpot_ms < 5


def test_a_handoff_takes_turns_of_the_decode_worker() -> None:
    """Three steps of 1.2 ms, of which all but the last may pass while the prompt is computed."""
    short, long = (by_cost(num, [load("d1")], [load("p1")]).decode for num in (40, 4000))
    step_ms = 1.2
    soon_ms = 1.0 + 0.2 * 40
    assert short.handoff_ms - HANDOFF_MS - 0.125 * 8 == pytest.approx(
        max(step_ms, 3 * step_ms - soon_ms), abs=0.1
    )
    assert long.handoff_ms - HANDOFF_MS - 0.125 * 800 == pytest.approx(step_ms, abs=0.1)


def test_waiting_for_room_after_the_first_token_slows_the_others() -> None:
    full, roomy = (load(f"d{most}", num_requests=4, max_batch=most) for most in (4, 8))
    placed = by_cost(40, [full, roomy], [load("p1")], max_tokens=600, output_tokens=101)
    slow, quick = placed.decode_candidates
    assert placed.prefill is not None
    waits_ms = slow.room_ms - placed.prefill.ttft_ms
    assert waits_ms > 0
    assert slow.tpot_ms - quick.tpot_ms == pytest.approx(waits_ms / 100)


def test_a_pair_of_the_usual_speed_costs_what_an_unknown_one_does() -> None:
    pairs = Pairs()
    pairs.observe("p1", "d1", 100, 400.0)
    prefill = [load("p1"), load("p2")]
    chosen = {
        by_cost(500, [load("d1")], prefill, seed=seed, pairs=pairs).prefill.worker_id
        for seed in range(16)
    }
    assert chosen == {"p1", "p2"}


def test_targets_outweigh_costs() -> None:
    """p1 has most of the prompt, but also a queue; d1 has the rest of the batch's time."""
    prefill = [load("p1", 120, queued_tokens=1500), load("p2")]
    decode = [load("d1"), load("d2", num_requests=30)]
    cheap = by_cost(2000, decode, prefill)
    assert cheap.prefill is not None
    assert cheap.prefill.worker_id == "p1"
    timely = by_cost(400, decode, prefill, targets=Targets(ttft_ms=100.0, tpot_ms=3.0))
    assert timely.prefill is not None
    assert (timely.prefill.worker_id, timely.decode.worker_id) == ("p2", "d1")
    assert timely.meets_targets


def test_a_worker_does_not_fetch_from_itself() -> None:
    elsewhere = HeldElsewhere("p1", 60, 20)
    assert (elsewhere.beside("p1"), elsewhere.beside("p2")) == (20, 60)
    placement = by_cost(1000, [load("d1")], [load("p1", 10)], elsewhere=elsewhere)
    assert placement.prefill is not None
    assert placement.prefill.fetch_tokens == 10 * BLOCK


def test_by_load_alone_cached_blocks_draw_nothing() -> None:
    decode = [load("d1", 60, num_requests=1), load("d2")]
    prefill = [load("p1", 60, queued_tokens=100), load("p2")]
    for seed in range(10):
        placement = by_cost(1000, decode, prefill, seed=seed, by_load=True)
        assert placement.prefill is not None
        assert (placement.decode.worker_id, placement.prefill.worker_id) == ("d2", "p2")
