"""Tiers below a pool whose layers keep windows: prefixes come back up to an end at which all groups
can go on, and the tokens stay right. The fake model reads only what a layer's window shows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kv_transfer.tiers.units import Units
from protocol.messages import Abort, CacheDump, TierName
from router.routing.caches.cache_index import CacheIndex
from scheduling import fetch_rule
from tests.effort import times
from tests.layouts import windowed_layout
from tests.unit.fake_model import BLOCK, VOCAB, continuation
from tests.unit.worker.tiers.test_loads import ask, finish, host_tier, root, run, turn
from tests.unit.worker_harness import ROUTER, Clock, DecodeBench, pinned_for_peers
from worker.counters import Count

LAYOUT = windowed_layout(BLOCK, 9, 17)
"""A block of the windowed groups has two units, and their covers are 2 and 4 blocks."""
PAGES, UNITS = 48, 1024
LONG = [(3 * i + i // 7) % VOCAB for i in range(16 * BLOCK + 1)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodeBench]:
    monkeypatch.setattr(fetch_rule, "SLACK_S", -1.0)  # anything is quicker than computing
    made = DecodeBench("d", Clock(), PAGES, host_slots=UNITS, layout=LAYOUT)
    yield made
    assert made.scheduler.pools.num_used == 0
    assert made.model.strays == []
    host_tier(made).index.check()
    made.close()


def warm(bench: DecodeBench) -> None:
    """Have LONG in host memory, and not in the pool."""
    run(bench, "first", LONG)
    turn(bench, 20)
    bench.scheduler.pools.clear_cache()


def units_of(bench: DecodeBench) -> Units:
    tiers = bench.host.tiers._tiers
    assert tiers is not None
    return tiers.units


def names_of(bench: DecodeBench, group: int) -> list[bytes]:
    """The units of the last block that a prefix of LONG needs."""
    return units_of(bench).names(group, root(bench, LONG)[15])


def test_an_evicted_prompt_is_loaded_up_to_its_end(bench: DecodeBench) -> None:
    warm(bench)
    assert run(bench, "again", LONG) == 1
    assert bench.counter(Count.LOADED_TOKENS) == 16 * BLOCK
    loaded = host_tier(bench).counts.num_loaded
    assert loaded == 16 + 2 * (2 + 4), "of windows, what they reach back from the end"


def test_a_prompt_that_turns_aside_is_loaded_up_to_a_checkpoint(bench: DecodeBench) -> None:
    bench.scheduler.pools.checkpoint_blocks = 5
    warm(bench)
    aside = [*LONG[: 14 * BLOCK + 2], 1, 2, 3]
    assert run(bench, "aside", aside) == len(aside) - 10 * BLOCK


def test_windows_that_are_still_in_the_pool_are_copied_there(bench: DecodeBench) -> None:
    run(bench, "first", LONG)
    turn(bench, 20)
    full, *windowed = bench.scheduler.pools.managers
    full.clear_cache()
    for group, manager in enumerate(windowed, 1):
        for digest in manager.hashes():
            for name in units_of(bench).names(group, digest):
                host_tier(bench).index.drop(name)
    assert run(bench, "again", LONG) == 1
    assert host_tier(bench).counts.num_loaded == 16


def test_a_copy_whose_source_was_evicted_meanwhile_does_not_count(bench: DecodeBench) -> None:
    run(bench, "first", LONG)
    turn(bench, 20)
    bench.scheduler.blocks.clear_cache()
    host_tier(bench).index.drop(names_of(bench, 1)[0])
    bench.tier_thread.is_held = True
    ask(bench, "again", LONG)
    turn(bench)
    bench.scheduler.pools.managers[1].clear_cache()
    bench.tier_thread.is_held = False
    assert finish(bench, "again") == continuation(LONG, 2)
    assert bench.counter(Count.LOADED_TOKENS) < 16 * BLOCK


@pytest.mark.parametrize("part", [0, -1])
def test_a_block_that_host_memory_has_in_part_is_saved_again(bench: DecodeBench, part: int) -> None:
    run(bench, "first", LONG)
    turn(bench, 20)
    names = names_of(bench, 1)
    assert host_tier(bench).has(names[part])
    host_tier(bench).index.drop(names[part])
    turn(bench, 20)
    assert all(map(host_tier(bench).has, names))


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_unit_that_fails_costs_a_computation(bench: DecodeBench, group: int) -> None:
    warm(bench)
    tier = host_tier(bench)
    slot = tier.index.find(names_of(bench, group)[-1])
    assert slot is not None
    tier.slot(slot)[0] ^= 1
    assert run(bench, "again", LONG) > 1
    assert bench.counter(Count.HOST_TIER_FAILURES) == 1


def test_blocks_stay_pinned_until_an_abandoned_load_is_over(bench: DecodeBench) -> None:
    warm(bench)
    bench.tier_thread.is_held = True
    ask(bench, "again", LONG)
    turn(bench)
    bench.tier_thread.run(1)  # copied, and not noticed yet
    bench.server.inbox.append((ROUTER, Abort(request_id="again", attempt=0)))
    bench.host.tiers.turn = lambda: None  # type: ignore[method-assign]
    turn(bench)
    assert [len(pinned_for_peers(bench, group)) for group in range(3)] == [16, 2, 4]
    del bench.host.tiers.turn
    bench.tier_thread.is_held = False
    turn(bench, 2)
    assert run(bench, "next", LONG) == 1, "what arrived is cached"


def test_what_no_prompt_can_go_on_from_is_not_kept(bench: DecodeBench) -> None:
    """A window block outside of checkpoints, and what has been withdrawn."""
    run(bench, "first", LONG)
    turn(bench, 20)
    names = host_tier(bench).index.names()
    assert sum(len(name) == len(names[0]) for name in names) == 16
    windows = sum(name[16:17] == b"\2" for name in names if len(name) > 16)
    assert 0 < windows < 2 * 16
    for group, manager in enumerate(bench.scheduler.pools.managers):
        manager.on_withdraw(root(bench, LONG)[:16])
        assert not any(
            bench.host.tiers._tiers.has(group, each)  # type: ignore[union-attr]
            for each in root(bench, LONG)[:16]
        )


@pytest.mark.parametrize("pages", [24, 36])
def test_many_requests_in_a_small_pool_give_the_right_tokens(
    monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """Documents are continued at any place, and the tier's thread is slow."""
    monkeypatch.setattr(fetch_rule, "SLACK_S", -1.0)
    rng = random.Random(pages)
    bench = DecodeBench("d", Clock(), pages, host_slots=160, layout=LAYOUT)
    documents = [[rng.randrange(VOCAB) for _ in range(8 * BLOCK)] for _ in range(4)]
    for number in range(times(40, 600)):
        prompt = [*rng.choice(documents)[: rng.randrange(1, 33)], number % VOCAB]
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


def test_routers_hear_where_a_prefix_in_host_memory_ends(bench: DecodeBench) -> None:
    bench.scheduler.pools.checkpoint_blocks = 5
    warm(bench)
    index = CacheIndex(pending_ttl_s=5.0)
    index.join("d", "i", has_windows=True)
    held = bench.host.tiers.hashes()[TierName.HOST]
    assert not index.apply_dump(
        "d", CacheDump(incarnation="i", seq=0, hashes=held, num_host=len(held), num_disk=0)
    )
    for length, end in ((16, 16), (14, 10)):
        hinted = index.match("d", root(bench, LONG)[:length], 0.0).num_own
        assert (
            run(bench, f"up to {length}", [*LONG[: length * BLOCK], 1])
            == 1 + (length - end) * BLOCK
        )
        assert hinted >= end
        bench.scheduler.pools.clear_cache()
    assert index.match("d", root(bench, LONG)[:16], 0.0).num_own == 16
