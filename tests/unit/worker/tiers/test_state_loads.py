"""Tiers below a pool whose layers keep states: the keys and values of a prefix come back with the
states at its end, or not at all. The fake model notices a state that is not its prefix's."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kv_transfer.tiers.kv_tiers import KvTiers
from protocol.messages import TierName
from scheduling import fetch_rule
from tests.effort import times
from tests.layouts import state_layout
from tests.unit.fake_model import BLOCK, VOCAB, continuation
from tests.unit.worker.tiers.test_loads import ask, finish, host_tier, root, run, turn
from tests.unit.worker_harness import Clock, DecodeBench
from worker.counters import Count

LAYOUT = state_layout(BLOCK, 38)
STATES, UNITS = 1, 10
"""The number of the group with states; units of a state, the last of which it only half fills."""
PAGES, SLOTS = 24, 256
LONG = [(3 * i + i // 7) % VOCAB for i in range(16 * BLOCK + 1)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodeBench]:
    monkeypatch.setattr(fetch_rule, "SLACK_S", -1.0)  # anything is quicker than computing
    made = DecodeBench("d", Clock(), PAGES, host_slots=SLOTS, layout=LAYOUT)
    yield made
    assert made.scheduler.pools.num_used == 0
    assert made.model.strays == []
    host_tier(made).index.check()
    made.close()


def tiers_of(bench: DecodeBench) -> KvTiers:
    tiers = bench.host.tiers._tiers
    assert tiers is not None
    return tiers


def warm(bench: DecodeBench) -> None:
    """Have LONG in host memory, and not in the pool."""
    run(bench, "first", LONG)
    turn(bench, 20)
    bench.scheduler.pools.clear_cache()


def test_an_evicted_prompt_is_loaded_with_the_state_at_its_end(bench: DecodeBench) -> None:
    warm(bench)
    assert run(bench, "again", LONG) == 1
    assert bench.counter(Count.LOADED_TOKENS) == 16 * BLOCK
    assert host_tier(bench).counts.num_loaded == 16 + UNITS


@pytest.mark.parametrize("group", [0, STATES])
def test_neither_keys_and_values_nor_a_state_come_alone(bench: DecodeBench, group: int) -> None:
    warm(bench)
    name = tiers_of(bench).units.names(group, root(bench, LONG)[15])[-1]
    host_tier(bench).index.drop(name)
    assert run(bench, "again", LONG) == len(LONG)
    assert bench.counter(Count.LOADED_TOKENS) == 0


@pytest.mark.parametrize("part", [0, UNITS - 1])
def test_a_part_of_a_state_that_fails_costs_a_computation(bench: DecodeBench, part: int) -> None:
    warm(bench)
    tier = host_tier(bench)
    slot = tier.index.find(tiers_of(bench).units.names(STATES, root(bench, LONG)[15])[part])
    assert slot is not None
    tier.slot(slot)[0] ^= 1
    assert run(bench, "again", LONG) > 1
    assert bench.counter(Count.HOST_TIER_FAILURES) == 1


def test_a_state_that_is_still_in_the_pool_is_copied_there(bench: DecodeBench) -> None:
    run(bench, "first", LONG)
    turn(bench, 20)
    bench.scheduler.blocks.clear_cache()
    for name in tiers_of(bench).units.names(STATES, root(bench, LONG)[15]):
        host_tier(bench).index.drop(name)
    assert run(bench, "again", LONG) == 1
    assert host_tier(bench).counts.num_loaded == 16


def test_routers_hear_of_an_end_while_a_tier_has_its_whole_state(bench: DecodeBench) -> None:
    warm(bench)
    known = set(bench.host.tiers.hashes()[TierName.HOST])
    host_tier(bench).index.drop(tiers_of(bench).units.names(STATES, root(bench, LONG)[15])[4])
    (end,) = known - set(bench.host.tiers.hashes()[TierName.HOST])
    assert end not in root(bench, LONG)


@pytest.mark.parametrize("pages", [12, 18])
def test_many_requests_in_a_small_pool_give_the_right_tokens(
    monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """Documents are continued at any place, and the tier's thread is slow."""
    monkeypatch.setattr(fetch_rule, "SLACK_S", -1.0)
    rng = random.Random(pages)
    bench = DecodeBench("d", Clock(), pages, host_slots=160, layout=LAYOUT)
    documents = [[rng.randrange(VOCAB) for _ in range(8 * BLOCK)] for _ in range(4)]
    for number in range(times(40, 600)):
        prompt = [*rng.choice(documents)[: BLOCK * rng.randrange(1, 9)], number % VOCAB]
        bench.tier_thread.is_held = rng.random() < 0.3
        ask(bench, f"r{number}", prompt)
        turn(bench, rng.randrange(3))
        bench.tier_thread.is_held = False
        assert finish(bench, f"r{number}") == continuation(prompt, 2)
        bench.scheduler.pools.check()
        host_tier(bench).index.check()
    assert bench.counter(Count.LOADED_TOKENS) > 0
    assert bench.model.strays == []
    assert bench.scheduler.pools.num_used == 0
    bench.close()
