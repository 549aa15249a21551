"""The routing policy: examples of each rule, and what must hold for every snapshot."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from protocol.errors import Overloaded, PromptTooLong
from router.routing.caches.cache_index import PrefixMatch
from router.routing.candidates import RETRY_STUCK_S
from router.routing.costs import HANDOFF_MS, exposed_blocks
from router.routing.pace import pace_of
from router.routing.pairs import Pairs
from router.routing.placement import (
    USUAL_OUTPUT_TOKENS,
    HeldElsewhere,
    Mode,
    Placement,
    PlacementQuery,
    Rule,
    Targets,
    WorkerLoad,
)
from router.routing.policy import NEAR_TIE, TIE_TOKENS, place
from router.routing.prediction import WorkerSpeed
from tests.effort import times

BLOCK = 16


SPEED = WorkerSpeed(1000.0, 200.0, 0.01, 512, 50.0, 0, 0, 10**6)
"""A token takes 0.2 ms."""


class Known(NamedTuple):
    """A worker and its part of the prompt."""

    load: WorkerLoad
    match: PrefixMatch


def load(
    worker_id: str, held: int = 0, speed: WorkerSpeed = SPEED, expected_blocks: int = 0, **fields
) -> Known:
    known = {
        "num_requests": 0,
        "queued_tokens": 0,
        "blocks_total": 1000,
        "blocks_claimed": 0,
        "blocks_stuck": 0,
        "max_context": 100_000,
    } | fields
    is_decode = not worker_id.startswith("p")
    pace = pace_of(
        speed, speed, known["queued_tokens"], known["num_requests"],
        known["num_requests"] if is_decode else 0,
    )  # fmt: skip
    made = WorkerLoad(worker_id=worker_id, pace=pace, speed=speed, **known)
    return Known(made, PrefixMatch(held, max(held, expected_blocks)))


def decide(num_tokens, decode, prefill, threshold=64, seed=0, pairs=None, **query):
    rng = query.pop("rng", None) or random.Random(seed)
    known = {"max_tokens": num_tokens + 1, "local_threshold_tokens": threshold}
    asked = PlacementQuery(num_tokens=num_tokens, block_size=BLOCK, **(known | query))
    matches = {
        each.load.worker_id: each.match
        for each in (*decode, *prefill)
        if each.match.held or each.match.expected
    }
    loads = [[each.load for each in some] for some in (decode, prefill)]
    return place(asked, *loads, matches, rng, pairs or Pairs())


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


speeds = st.builds(
    lambda fixed, token, attended, decodes: WorkerSpeed(
        fixed, token, attended, 512, 50.0, decodes, 300 * decodes, 10**6
    ),
    st.sampled_from([500.0, 5000.0]),
    st.sampled_from([20.0, 200.0]),
    st.sampled_from([0.0, 0.01]),
    st.integers(0, 20),
)
workers = st.builds(
    lambda number, requests, queued, total, used, stuck, held, expected, context, speed: load(
        f"w{number}",
        held,
        speed,
        expected,
        num_requests=requests,
        queued_tokens=queued,
        blocks_total=total,
        blocks_claimed=max(min(used, total), min(stuck, total)),
        blocks_stuck=min(stuck, total),
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
    speeds,
)
fleets = st.lists(workers, max_size=8, unique_by=lambda each: each.load.worker_id)
alike = st.lists(
    st.builds(
        lambda number, queued: load(f"w{number}", queued_tokens=queued),
        st.integers(0, 1000),
        st.integers(0, 60),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda each: each.load.worker_id,
)
"""Workers whose costs differ by no more than the times of moving KV."""
rates = st.dictionaries(
    st.tuples(st.integers(0, 7), st.integers(0, 7)), st.sampled_from([0.01, 1.0]), max_size=20
)
queries = st.fixed_dictionaries(
    {
        "num_tokens": st.integers(1, 3000),
        "threshold": st.one_of(st.none(), st.integers(0, 200)),
        "seed": st.integers(0, 10),
        "targets": st.builds(
            Targets,
            st.sampled_from([None, 5.0, 100.0, 1000.0]),
            st.sampled_from([None, 1.0, 5.0, 20.0]),
        ),
    }
)


class Scene(NamedTuple):
    """A fleet and a query."""

    decode: list[Known]
    prefill: list[Known]
    pairs: Pairs
    query: dict

    def decide(self, **more) -> Placement:
        return decide(
            decode=self.decode, prefill=self.prefill, pairs=self.pairs, **(self.query | more)
        )

    def may_run(self, each: Known) -> bool:
        return each.load.max_context > self.query["num_tokens"] and self.fits(each)

    def fits(self, each: Known) -> bool:
        return each.load.blocks_total >= -(-self.query["num_tokens"] // BLOCK)

    def has_room(self, each: Known) -> bool:
        room = each.load.blocks_total - each.load.blocks_stuck
        return -(-self.query["num_tokens"] // BLOCK) - each.match.held <= room


@st.composite
def scenes(draw: st.DrawFn, of: st.SearchStrategy[list[Known]] = fleets) -> Scene:
    decode, prefill = draw(of), draw(of)
    both = {each.load.worker_id for each in decode} & {each.load.worker_id for each in prefill}
    prefill = [each for each in prefill if each.load.worker_id not in both]
    pairs = Pairs()
    for (source, sink), ms_per_block in draw(rates).items():
        if source < len(prefill) and sink < len(decode):
            names = prefill[source].load.worker_id, decode[sink].load.worker_id
            pairs.observe(*names, 100, 100 * ms_per_block)
    query = draw(queries)
    names = [each.load.worker_id for each in (*decode, *prefill)]
    query["exclude"] = frozenset(draw(st.sets(st.sampled_from(names), max_size=3)) if names else ())
    return Scene(decode, prefill, pairs, query)


@settings(max_examples=times(60, 500), deadline=None)
@given(scenes())
def test_no_worker_without_room_and_none_that_is_excluded(scene: Scene) -> None:
    fitting = {each.load.worker_id for each in scene.decode if scene.may_run(each)}
    roomy = {e.load.worker_id for e in scene.decode if scene.may_run(e) and scene.has_room(e)}
    exclude = scene.query["exclude"]
    try:
        placement = scene.decide()
    except Overloaded:
        assert not scene.decode or (fitting and not roomy)
        return
    except PromptTooLong:
        assert scene.decode
        assert not fitting
        return
    assert placement.decode.worker_id in roomy
    if roomy - exclude:
        assert placement.decode.worker_id not in exclude
    able = [
        each.load.worker_id
        for each in scene.prefill
        if scene.fits(each)
        and scene.has_room(each)
        and each.load.max_context >= scene.query["num_tokens"]
    ]
    assert (placement.mode is Mode.REMOTE) == (placement.prefill is not None)
    if placement.prefill is not None:
        assert placement.prefill.worker_id in set(able) - exclude
    elif scene.query["threshold"] is not None and set(able) - exclude:
        assert placement.decode.missing_tokens <= scene.query["threshold"]
    assert 1 <= placement.decode.missing_tokens <= scene.query["num_tokens"]


@settings(max_examples=times(40, 500), deadline=None)
@given(scenes())
def test_the_choice_is_the_cheapest_that_meets_the_targets(scene: Scene) -> None:
    """Each pair of workers is a fleet of its own, too; near-ties count as equal."""
    scene.query.update(threshold=None, exclude=frozenset())
    try:
        chosen = scene.decide()
    except (Overloaded, PromptTooLong):
        return
    for decode, prefill in itertools.product(scene.decode, scene.prefill):
        try:
            other = scene._replace(decode=[decode], prefill=[prefill]).decide()
        except (Overloaded, PromptTooLong):
            continue
        if other.rule is Rule.PREFILL_UNFIT or (other.rule is Rule.SPARE is not chosen.rule):
            continue
        assert chosen.meets_targets in (True, other.meets_targets)
        if chosen.meets_targets == other.meets_targets:
            assert chosen.cost_ms <= other.cost_ms + 2 * chosen.tie_ms + 1e-6


class NotingRandom(random.Random):
    """Notes among what it chose last."""

    choices: Sequence = ()

    def choice(self, seq):
        self.choices = seq
        return super().choice(seq)


@settings(max_examples=times(60, 1000), deadline=None)
@given(scenes(st.one_of(alike, fleets)), st.sampled_from([0, 0, 200]))
def test_the_pairs_that_count_as_cheapest_are_those_of_a_full_comparison(
    scene: Scene, under_way: int
) -> None:
    scene.query.update(threshold=0, exclude=frozenset(), targets=Targets())
    pairs, rng, costs = scene.pairs, NotingRandom(0), {}
    usual = pairs.usual_ms_per_block
    assume(usual is not None)
    pairs.pair(scene.prefill[0].load.worker_id, scene.decode[0].load.worker_id).reserve(under_way)
    try:
        placement = scene.decide(rng=rng)
    except (Overloaded, PromptTooLong):
        return
    assume(placement.mode is Mode.REMOTE)
    for sink, source in itertools.product(
        placement.decode_candidates, placement.prefill_candidates
    ):
        names = sink.worker_id, source.worker_id
        costs[names] = sink.cost_ms + source.cost_ms
        if (pair := pairs.find(*names[::-1])) is not None:
            blocks = exposed_blocks(sink.recompute_tokens, BLOCK)
            costs[names] += pair.transfer_ms(blocks, usual) - blocks * usual
    sinks = {each.worker_id for each in placement.decode_candidates}
    paces = [each.load.pace for each in scene.decode if each.load.worker_id in sinks]
    least, idle_ms = min(costs.values()), min(each.idle_ms for each in paces)
    limit = least + TIE_TOKENS * min(each.per_token_us for each in paces) / 1000
    limit += NEAR_TIE * max(0.0, least - USUAL_OUTPUT_TOKENS * idle_ms)
    near = {names for names, cost_ms in costs.items() if cost_ms <= limit}
    assert {(sink, source) for sink, source, *_ in rng.choices} == near


@settings(max_examples=times(40, 300), deadline=None)
@given(scenes(), st.randoms())
def test_decisions_depend_on_the_seed_and_not_on_the_order_of_workers(scene, shuffler) -> None:
    try:
        first = scene.decide()
    except (Overloaded, PromptTooLong):
        return
    decode, prefill = list(scene.decode), list(scene.prefill)
    shuffler.shuffle(decode)
    shuffler.shuffle(prefill)
    second = scene._replace(decode=decode, prefill=prefill).decide()
    assert (second.decode, second.prefill, second.rule) == (first.decode, first.prefill, first.rule)
    assert (second.cost_ms, second.reason) == (first.cost_ms, first.reason)
    assert scene.decide() == first


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
