"""The routing policy: examples of each rule."""

from __future__ import annotations

from collections import Counter

import pytest

from protocol.errors import Overloaded, PromptTooLong
from router.routing.candidates import RETRY_STUCK_S
from router.routing.placement import (
    Mode,
    Rule,
)
from tests.unit.router.routing.placements import BLOCK, decide, load


def test_a_request_goes_where_the_batch_has_a_place() -> None:
    full, roomy = (load(f"d{most}", num_requests=4, max_batch=most) for most in (4, 8))
    chosen = {decide(1000, [full, roomy], [], seed=seed).decode.worker_id for seed in range(8)}
    assert chosen == {"d8"}


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
    costs = {each.worker_id: each.cost_ms for each in placement.decode_candidates}
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
    assert placement.reason.startswith("remote: d1 lacks 20 tokens and would cost 52.6")
    assert f"; p1 and {placement.decode.worker_id} cost 175" in placement.reason


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
    decode, prefill = [load("d1", 100, num_requests=1), load("d2")], [load("p1", 100)]
    placement = decide(1620, decode, prefill)
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
