"""What must hold for every decision, whatever the fleet and the prompt."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from protocol.errors import Overloaded, PromptTooLong
from router.routing.costs import exposed_blocks
from router.routing.pairs import Pairs
from router.routing.placement import (
    USUAL_OUTPUT_TOKENS,
    Mode,
    Placement,
    Rule,
    Targets,
)
from router.routing.policy import NEAR_TIE, TIE_TOKENS
from router.routing.prediction import WorkerSpeed
from tests.effort import times
from tests.unit.router.routing.placements import BLOCK, Known, decide, load

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
            costs[names] += pair.transfer_ms(blocks, usual, pairs.now) - blocks * usual
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
