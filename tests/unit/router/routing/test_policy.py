"""The routing policy: examples of each rule, and what must hold for every snapshot."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import Overloaded, PromptTooLong
from router.routing.policy import place
from router.routing.view import Mode, PlacementQuery, WorkerLoad

BLOCK = 16


def load(worker_id: str, held: int = 0, **fields: int) -> WorkerLoad:
    known = {
        "num_requests": 0,
        "queued_tokens": 0,
        "blocks_total": 1000,
        "blocks_used": 0,
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
    decode = [load("d1", num_requests=20), load("d2"), load("d3", blocks_used=990)]
    prefill = [load("p1", queued_tokens=4000), load("p2", queued_tokens=100)]
    placement = decide(500, decode, prefill)
    assert placement.prefill is not None
    assert (placement.decode.worker_id, placement.prefill.worker_id) == ("d2", "p2")
    costs = {each.worker_id: each.cost for each in placement.decode_candidates}
    assert costs["d2"] < costs["d1"]
    assert costs["d2"] < costs["d3"]
    assert [each.worker_id for each in placement.prefill_candidates] == ["p1", "p2"]
    assert placement.decode_candidates[2].shortage_tokens == (32 - 10) * BLOCK


def test_near_ties_spread() -> None:
    decode = [load(f"d{each}", num_requests=40 + each % 2) for each in range(4)]
    decode.append(load("d4", num_requests=50))
    prefill = [load("p0")]
    placements = [decide(500, decode, prefill, seed=seed) for seed in range(400)]
    chosen = Counter(each.decode.worker_id for each in placements)
    assert set(chosen) == {"d0", "d1", "d2", "d3"}
    assert min(chosen.values()) > 60


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
    with pytest.raises(PromptTooLong, match=r"513 tokens, .* holds 512"):
        decide(513, decode, prefill)


def test_a_request_goes_to_workers_whose_context_holds_its_output_too() -> None:
    decode = [load("d1", held=6, max_context=199), load("d2", max_context=200)]
    prefill = [load("p1", max_context=199)]
    placement = decide(100, decode, prefill, max_tokens=200)
    assert placement.decode.worker_id == "d2"
    assert placement.prefill is None
    with pytest.raises(PromptTooLong, match="201 tokens, but no decode worker"):
        decide(100, decode, prefill, max_tokens=201)


def test_without_decode_workers_it_is_overloaded() -> None:
    with pytest.raises(Overloaded):
        decide(10, [], [load("p1")])


loads = st.builds(
    lambda number, requests, queued, total, used, held, expected, context: WorkerLoad(
        worker_id=f"w{number}",
        num_requests=requests,
        queued_tokens=queued,
        blocks_total=total,
        blocks_used=min(used, total),
        held_blocks=held,
        expected_blocks=max(held, expected),
        max_context=context,
    ),
    st.integers(0, 1000),
    st.integers(0, 50),
    st.integers(0, 10_000),
    st.integers(1, 300),
    st.integers(0, 300),
    st.integers(0, 100),
    st.integers(0, 100),
    st.sampled_from([1000, 5000]),
)
fleets = st.lists(loads, max_size=5, unique_by=lambda each: each.worker_id)


@settings(max_examples=300, deadline=None)
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

    fitting = {each.worker_id for each in decode if fits(each)}
    try:
        placement = decide(num_tokens, decode, prefill, threshold, seed, exclude=exclude)
    except Overloaded:
        assert not decode
        return
    except PromptTooLong:
        assert decode
        assert not fitting
        return
    assert placement.decode.worker_id in fitting
    if fitting - exclude:
        assert placement.decode.worker_id not in exclude
    usable = [each for each in prefill if fits(each) and each.worker_id not in exclude]
    assert (placement.mode is Mode.REMOTE) == (placement.prefill is not None)
    if placement.prefill is not None:
        assert placement.prefill.worker_id in {each.worker_id for each in usable}
        assert all(each.missing_tokens > threshold for each in placement.decode_candidates)
        cheapest = min(each.cost for each in placement.prefill_candidates)
        assert placement.prefill.cost <= cheapest * 1.05 + 8
    else:
        assert placement.decode.missing_tokens <= threshold or not usable
    assert 1 <= placement.decode.missing_tokens <= num_tokens
