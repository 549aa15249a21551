"""A worker that has a prompt in its own tiers is a cheap place for it, as cheap as its tiers are
fast."""

from __future__ import annotations

import random
from typing import Any

from router.routing.caches.cache_index import PrefixMatch
from router.routing.costs import LOAD_MS, Costs
from router.routing.pace import pace_of
from router.routing.pairs import Pairs
from router.routing.placement import HeldElsewhere, Mode, Placement, PlacementQuery, WorkerLoad
from router.routing.policy import place
from router.routing.prediction import WorkerSpeed

BLOCK = 16
SPEED = WorkerSpeed(1000.0, 200.0, 0.01, 512, 50.0, 0, 0, 10**6)
"""A token takes 0.2 ms, a block 3.2."""
TIERED = PrefixMatch(10, 10, in_host=30, on_disk=20)


def load(worker_id: str, **fields: Any) -> WorkerLoad:
    return WorkerLoad(
        worker_id=worker_id,
        num_requests=0,
        queued_tokens=0,
        blocks_total=1000,
        blocks_claimed=0,
        blocks_stuck=0,
        max_context=100_000,
        pace=pace_of(SPEED, SPEED, 0, 0, 0),
        speed=SPEED,
        **fields,
    )


def query(num_tokens: int = 1000, **fields: Any) -> PlacementQuery:
    return PlacementQuery(
        num_tokens=num_tokens, max_tokens=num_tokens + 10, block_size=BLOCK, **fields
    )


def candidate(
    match: PrefixMatch, asked: PlacementQuery, host_us: int = 100, disk_us: int = 500
) -> tuple[int, int, float]:
    """Tokens that are missing now, tokens to bring, and the time that takes."""
    tiered = load("d1", host_block_us=host_us, disk_block_us=disk_us)
    (found,) = Costs(asked, {"d1": match}, Pairs()).local([tiered], alone=True)
    return found.recompute_tokens, found.fetch_tokens, found.fetch_ms


def test_blocks_in_tiers_cost_what_loading_them_takes() -> None:
    missing, brought, ms = candidate(TIERED, query())
    assert (missing, brought) == (1000 - 10 * BLOCK, 50 * BLOCK)
    assert ms == LOAD_MS + (50 * 100 + 20 * 500) / 1e3, "those on disk pass through host memory"


def test_what_is_slower_than_computing_is_computed() -> None:
    assert candidate(TIERED, query(), host_us=10_000)[1:] == (0, 0.0)


def test_the_last_token_is_computed() -> None:
    assert candidate(TIERED, query(60 * BLOCK))[1] == 49 * BLOCK


def test_what_is_expected_need_not_be_loaded() -> None:
    missing, brought, ms = candidate(PrefixMatch(10, 45, in_host=30, on_disk=20), query())
    assert (missing, brought) == (1000 - 45 * BLOCK, 15 * BLOCK)
    whole = (50 * 100 + 20 * 500) / 1e3
    assert abs(ms - LOAD_MS - whole * 15 / 50) < 1e-9


def test_behind_the_tiers_another_worker_s_blocks_are_fetched() -> None:
    asked = query(elsewhere=HeldElsewhere("d2", 62, 0))
    assert candidate(TIERED, asked)[1] == 52 * BLOCK
    assert candidate(TIERED, query(elsewhere=HeldElsewhere("d2", 20, 0)))[1] == 50 * BLOCK


def test_by_load_nothing_counts() -> None:
    assert candidate(TIERED, query(by_load=True))[1:] == (0, 0.0)


def placed(match: PrefixMatch, **tiers: int) -> Placement:
    decode = [load("d1", **tiers), load("d2")]
    return place(query(), decode, [load("p1")], {"d1": match}, random.Random(1), Pairs())


def test_a_turn_goes_where_its_evicted_history_can_be_loaded() -> None:
    """No pool has any of it any more."""
    found = placed(PrefixMatch(0, 0, in_host=60), host_block_us=50, disk_block_us=0)
    assert (found.mode, found.decode.worker_id) == (Mode.LOCAL, "d1")
    slow = placed(PrefixMatch(0, 0, on_disk=60), host_block_us=50, disk_block_us=50_000)
    assert slow.mode is Mode.REMOTE
