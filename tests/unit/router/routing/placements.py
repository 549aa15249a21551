"""Workers as the policy sees them, and decisions about a prompt."""

from __future__ import annotations

import random
from typing import NamedTuple

from router.routing.caches.cache_index import PrefixMatch
from router.routing.pace import pace_of
from router.routing.pairs import Pairs
from router.routing.placement import (
    PlacementQuery,
    WorkerLoad,
)
from router.routing.policy import place
from router.routing.prediction import WorkerSpeed

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


def by_cost(num_tokens, decode, prefill, **query):
    return decide(num_tokens, decode, prefill, None, **query)
