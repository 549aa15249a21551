"""The routing policy: examples of each rule, and what must hold for every snapshot."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import Overloaded, PromptTooLong
from router.routing.policy import RETRY_STUCK_S, place
from router.routing.view import HeldElsewhere, Mode, PlacementQuery, Rule, WorkerLoad
from tests.effort import times

BLOCK = 16


def load(worker_id: str, held: int = 0, **fields: int) -> WorkerLoad:
    known = {
        "num_requests": 0,
        "queued_tokens": 0,
        "blocks_total": 1000,
        "blocks_claimed": 0,
        "blocks_stuck": 0,
        "held_blocks": held,
        "expected_blocks": held,
        "max_context": 100_000,
    }
    return WorkerLoad(worker_id=worker_id, **(known | fields))


def decide(num_tokens, decode, prefill, threshold=64, seed=0, **query):
    known = {"max_tokens": num_tokens + 1}
    asked = PlacementQuery(num_tokens=num_tokens, block_size=BLOCK, **(known | query))
    return place(asked, decode, prefill, threshold, random.Random(seed))


def test_a_new_prompt_is_prefilled_remotely() -> None:
    placement = decide(500, [load("d1")], [load("p1")])
    assert placement.mode is Mode.REMOTE
    assert placement.decode.worker_id == "d1"
    assert placement.prefill is not None
    assert placement.prefill.worker_id == "p1"
    assert placement.prefill.missing_tokens == 500
    assert placement.reason.startswith("remote")


@pytest.mark.parametrize(
    ("num_tokens", "held", "mode"),
    [
        (64, 0, Mode.LOCAL),
        (65, 0, Mode.REMOTE),
        (1064, 62, Mode.REMOTE),
        (1056, 62, Mode.LOCAL),
        (1056, 66, Mode.LOCAL),
    ],
)
def test_the_threshold_is_in_tokens_that_are_not_cached(num_tokens, held, mode) -> None:
    assert decide(num_tokens, [load("d1", held)], [load("p1")]).mode is mode


def test_threshold_zero_sends_even_a_whole_cached_prompt_to_a_prefill_worker() -> None:
    """The last token is always computed, so one token is always missing."""
    assert decide(32, [load("d1", 2)], [load("p1")], threshold=0).mode is Mode.REMOTE
    assert decide(1, [load("d1")], [load("p1")], threshold=0).mode is Mode.REMOTE


def test_without_prefill_workers_everything_is_local() -> None:
    placement = decide(5000, [load("d1")], [])
    assert placement.mode is Mode.LOCAL
    assert placement.prefill is None
    assert placement.decode.missing_tokens == 5000
    assert placement.reason == "local: no prefill worker is ready"


def test_what_is_only_expected_does_not_make_a_prompt_local() -> None:
    """It is not there yet; but it draws the prompt to the worker that will have it."""
    decode = [load("d1", expected_blocks=31), load("d2")]
    prefill = [load("p1"), load("p2", expected_blocks=31, queued_tokens=500)]
    for seed in range(20):
        placement = decide(500, decode, prefill, seed=seed)
        assert placement.mode is Mode.REMOTE
        assert placement.decode.worker_id == "d1"
        assert placement.prefill is not None
        assert placement.prefill.worker_id == "p2"


def test_a_prefix_hit_yields_to_a_long_queue() -> None:
    prefill = [load("p1", 31, queued_tokens=5000), load("p2")]
    placement = decide(500, [load("d1")], prefill)
    assert placement.prefill is not None
    assert placement.prefill.worker_id == "p2"


def test_the_least_loaded_pair_is_chosen_and_all_numbers_are_kept() -> None:
    decode = [load("d1", num_requests=20), load("d2"), load("d3", blocks_claimed=990)]
    prefill = [load("p1", queued_tokens=4000), load("p2", queued_tokens=100)]
    placement = decide(500, decode, prefill)
    assert placement.prefill is not None
    assert (placement.decode.worker_id, placement.prefill.worker_id) == ("d2", "p2")
    costs = {each.worker_id: each.cost for each in placement.decode_candidates}
    assert costs["d2"] < costs["d1"]
    assert costs["d2"] < costs["d3"]
    assert [each.worker_id for each in placement.prefill_candidates] == ["p1", "p2"]
    assert placement.decode_candidates[2].shortage_tokens == (32 - 10) * BLOCK


def test_a_hot_prefix_does_not_overload_the_worker_that_holds_it() -> None:
    """A full worker with 2,000 requests costs 200 times what another one costs."""
    hot = load(
        "d1", 25, num_requests=2000, queued_tokens=100_000, blocks_claimed=1000, max_context=10**6
    )
    decode, prefill = [hot, load("d2"), load("d3", num_requests=1)], [load("p1", 25)]
    for seed in range(200):
        placement = decide(420, decode, prefill, seed=seed)
        assert (placement.mode, placement.rule) == (Mode.REMOTE, Rule.LOADED)
        assert placement.decode.worker_id in ("d2", "d3")
    told = "remote: d1 lacks 20 tokens at a cost of 132"
    assert placement.reason.startswith(told)
    assert placement.reason.endswith(f"p1 and {placement.decode.worker_id} cost less")


def test_requests_of_one_prefix_spread_as_load_grows() -> None:
    """Each request adds to the load of its worker and leaves the prefix there."""
    requests, holders = {"d1": 0, "d2": 0, "d3": 0}, {"d1"}
    for seed in range(150):
        decode = [
            load(name, 25 * (name in holders), num_requests=count)
            for name, count in requests.items()
        ]
        placement = decide(420, decode, [load("p1", 25)], seed=seed)
        requests[placement.decode.worker_id] += 1
        holders.add(placement.decode.worker_id)
    assert holders == {"d1", "d2", "d3"}
    assert max(requests.values()) - min(requests.values()) <= 8


def test_a_lightly_loaded_worker_keeps_its_prefix() -> None:
    decode, prefill = [load("d1", 25, num_requests=2), load("d2")], [load("p1", 25)]
    placement = decide(420, decode, prefill)
    assert (placement.mode, placement.decode.worker_id) == (Mode.LOCAL, "d1")


def test_without_prefill_workers_a_hot_prefix_spreads_too() -> None:
    decode = [load("d1", 25, num_requests=100), load("d2")]
    placement = decide(420, decode, [])
    assert placement.decode.worker_id == "d2"
    assert placement.reason == "local: no prefill worker is ready"
    assert decide(420, [load("d1", 25, num_requests=3), load("d2")], []).rule is Rule.NEAR


def test_near_ties_spread() -> None:
    decode = [load(f"d{each}", num_requests=40 + each % 2) for each in range(4)]
    decode.append(load("d4", num_requests=50))
    prefill = [load("p0")]
    placements = [decide(500, decode, prefill, seed=seed) for seed in range(400)]
    chosen = Counter(each.decode.worker_id for each in placements)
    assert set(chosen) == {"d0", "d1", "d2", "d3"}
    assert min(chosen.values()) > 60


def test_a_session_breaks_near_ties_and_no_more() -> None:
    decode = [load("d1"), load("d2"), load("d3", num_requests=5)]
    prefill = [load("p1"), load("p2")]
    for seed in range(20):
        near = decide(500, decode, prefill, seed=seed, session_workers=frozenset({"d2", "p1"}))
        assert near.prefill is not None
        assert (near.decode.worker_id, near.prefill.worker_id) == ("d2", "p1")
        far = decide(500, decode, prefill, seed=seed, session_workers=frozenset({"d3"}))
        assert far.decode.worker_id != "d3"


def test_excluded_workers_are_avoided_while_others_are_left() -> None:
    decode, prefill = [load("d1"), load("d2", num_requests=50)], [load("p1"), load("p2")]
    placement = decide(500, decode, prefill, exclude=frozenset({"d1", "p2"}))
    assert placement.prefill is not None
    assert (placement.decode.worker_id, placement.prefill.worker_id) == ("d2", "p1")
    assert placement.excluded == ("d1", "p2")


def test_excluded_decode_workers_return_when_no_other_is_left() -> None:
    placement = decide(500, [load("d1")], [load("p1")], exclude=frozenset({"d1", "p1"}))
    assert placement.decode.worker_id == "d1"
    assert placement.mode is Mode.LOCAL
    assert placement.reason == "local: no prefill worker may take it"


def test_a_worker_that_has_a_part_is_preferred() -> None:
    decode = [load("d1", num_requests=9), load("d2")]
    placement = decide(500, decode, [load("p1")], prefer_decode="d1")
    assert placement.decode.worker_id == "d1"


def test_a_prompt_is_not_placed_where_it_cannot_fit() -> None:
    decode = [load("d1", blocks_total=31), load("d2", num_requests=50, blocks_total=32)]
    prefill = [load("p1", blocks_total=31)]
    placement = decide(500, decode, prefill)
    assert placement.decode.worker_id == "d2"
    assert placement.mode is Mode.LOCAL
    with pytest.raises(PromptTooLong, match=r"513 tokens .* holds 512"):
        decide(513, decode, prefill)
    holds_its_prefix = [load("p1", held=20, blocks_total=31)]
    assert decide(500, decode, holds_its_prefix).mode is Mode.LOCAL, "a held prefix adds no blocks"


def test_a_request_goes_to_workers_whose_context_holds_its_output_too() -> None:
    decode = [load("d1", held=6, max_context=199), load("d2", max_context=200)]
    placement = decide(100, decode, [load("p1", max_context=99)], max_tokens=200)
    assert placement.decode.worker_id == "d2"
    assert placement.prefill is None
    placement = decide(100, decode, [load("p1", max_context=100)], max_tokens=200)
    assert placement.prefill is not None, "the output is not the prefill worker's"
    with pytest.raises(PromptTooLong, match=r"201 tokens .* No ready decode worker"):
        decide(100, decode, [load("p1")], max_tokens=201)


def test_without_decode_workers_it_is_overloaded() -> None:
    with pytest.raises(Overloaded):
        decide(10, [], [load("p1")])


def by_cost(num_tokens, decode, prefill, **query):
    return decide(num_tokens, decode, prefill, None, **query)


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


loads = st.builds(
    lambda number, requests, queued, total, used, stuck, held, expected, context: WorkerLoad(
        worker_id=f"w{number}",
        num_requests=requests,
        queued_tokens=queued,
        blocks_total=total,
        blocks_claimed=max(min(used, total), min(stuck, total)),
        blocks_stuck=min(stuck, total),
        held_blocks=held,
        expected_blocks=max(held, expected),
        max_context=context,
    ),
    st.integers(0, 1000),
    st.integers(0, 50),
    st.integers(0, 10_000),
    st.integers(1, 300),
    st.integers(0, 300),
    st.sampled_from([0, 0, 5, 20, 90, 300]),
    st.integers(0, 100),
    st.integers(0, 100),
    st.sampled_from([1000, 5000]),
)
fleets = st.lists(loads, max_size=5, unique_by=lambda each: each.worker_id)


def decide_local(num_tokens: int, each: WorkerLoad, threshold: int) -> int | None:
    """What the prompt costs on this worker alone; None if too much of it is missing there."""
    alone = decide(num_tokens, [each], [])
    return alone.decode.cost if alone.decode.missing_tokens <= threshold else None


@settings(max_examples=times(100, 300), deadline=None)
@given(
    decode=fleets,
    prefill=fleets,
    num_tokens=st.integers(1, 3000),
    threshold=st.integers(0, 200),
    excluded=st.sets(st.integers(0, 9), max_size=5),
    seed=st.integers(0, 10),
)
def test_every_placement_keeps_the_rules(
    decode, prefill, num_tokens, threshold, excluded, seed
) -> None:
    everyone = [each.worker_id for each in (*decode, *prefill)]
    exclude = frozenset(everyone[each] for each in excluded if each < len(everyone))
    blocks = -(-num_tokens // BLOCK)

    def fits(each: WorkerLoad) -> bool:
        return each.blocks_total >= blocks and each.max_context > num_tokens

    def has_room(each: WorkerLoad) -> bool:
        return blocks - each.held_blocks <= each.blocks_total - each.blocks_stuck

    fitting = {each.worker_id for each in decode if fits(each)}
    roomy = {each.worker_id for each in decode if fits(each) and has_room(each)}
    try:
        placement = decide(num_tokens, decode, prefill, threshold, seed, exclude=exclude)
    except Overloaded:
        assert not decode or (fitting and not roomy)
        return
    except PromptTooLong:
        assert decode
        assert not fitting
        return
    assert placement.decode.worker_id in roomy
    if roomy - exclude:
        assert placement.decode.worker_id not in exclude
    usable = [each for each in prefill if fits(each) and has_room(each)]
    usable = [each for each in usable if each.worker_id not in exclude]
    assert (placement.mode is Mode.REMOTE) == (placement.prefill is not None)
    if placement.prefill is not None:
        assert placement.prefill.worker_id in {each.worker_id for each in usable}
        near = [each for each in decode if each.worker_id in roomy - exclude or roomy <= exclude]
        costs = [
            decide_local(num_tokens, each, threshold) for each in near if each.worker_id in roomy
        ]
        pair = placement.decode.cost + placement.prefill.cost
        assert all(cost is None or cost > pair * 0.9 - 8 for cost in costs)
        assert (placement.rule is Rule.LOADED) == any(cost is not None for cost in costs)
        cheapest = min(each.cost for each in placement.prefill_candidates)
        assert placement.prefill.cost <= cheapest * 1.05 + 8
    else:
        assert placement.decode.missing_tokens <= threshold or not usable
        assert (placement.rule is Rule.NEAR) == (placement.decode.missing_tokens <= threshold)
    assert 1 <= placement.decode.missing_tokens <= num_tokens


def test_a_held_prefix_makes_room_only_as_far_as_it_may_be_stuck() -> None:
    """80 blocks of prompt in a pool of 100: stuck blocks may hold its prefix, others do not."""
    tokens = 80 * BLOCK
    fits = [(20, 0), (40, 20), (40, 30), (90, 80)]
    does_not = [(21, 0), (40, 19), (90, 60)]
    for stuck, held in fits:
        only = load("d", held, blocks_total=100, blocks_stuck=stuck)
        assert decide(tokens, [only], []).decode.worker_id == "d", (stuck, held)
    for stuck, held in does_not:
        only = load("d", held, blocks_total=100, blocks_stuck=stuck)
        with pytest.raises(Overloaded, match="needs 80 KV blocks") as caught:
            decide(tokens, [only], [])
        assert caught.value.retry_after_s == RETRY_STUCK_S
