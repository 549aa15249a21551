"""Which worker of a pool computes a prompt, by rules that other routers use or papers propose.

Each rule takes the request, the workers' loads and a random generator, and returns a worker. The
constants are those of the sources. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from router.routing.pace import Pace
from router.routing.placement import PlacementQuery
from scheduling.step_model import attended_pairs


class PoolLoad(msgspec.Struct, frozen=True, gc=False):
    """A worker's load, and the leading blocks of the prompt that it holds, now and soon."""

    worker_id: str
    num_requests: int
    queued_tokens: int
    blocks_total: int
    blocks_claimed: int
    max_context: int
    held_blocks: int
    expected_blocks: int
    pace: Pace


Rule = Callable[[PlacementQuery, Sequence[PoolLoad], random.Random], PoolLoad]


def missing_tokens(query: PlacementQuery, load: PoolLoad) -> int:
    """Tokens of the prompt that a worker would have to compute when its turn comes."""
    cached = max(load.held_blocks, load.expected_blocks) * query.block_size
    return max(1, query.num_tokens - cached)


def at_random(query: PlacementQuery, loads: Sequence[PoolLoad], rng: random.Random) -> PoolLoad:
    """Any worker."""
    return rng.choice(loads)


def least_loaded(query: PlacementQuery, loads: Sequence[PoolLoad], rng: random.Random) -> PoolLoad:
    """The fewest requests, then the fewest tokens to compute."""
    return _least(loads, lambda load: (load.num_requests, load.queued_tokens), rng)


def power_of_two(query: PlacementQuery, loads: Sequence[PoolLoad], rng: random.Random) -> PoolLoad:
    """The less loaded of two random workers (Mitzenmacher, 2001)."""
    drawn = rng.sample(list(loads), min(2, len(loads)))
    return least_loaded(query, drawn, rng)


def prefix_affinity(
    query: PlacementQuery, loads: Sequence[PoolLoad], rng: random.Random
) -> PoolLoad:
    """The longest cached prefix, whatever the load; then the fewest requests."""
    return _least(loads, lambda load: (missing_tokens(query, load), load.num_requests), rng)


def lmetric(query: PlacementQuery, loads: Sequence[PoolLoad], rng: random.Random) -> PoolLoad:
    """New prompt tokens times the size of the batch (arXiv 2603.15202)."""
    return _least(
        loads,
        lambda load: (load.queued_tokens + missing_tokens(query, load)) * (load.num_requests + 1),
        rng,
    )


_STICKY_SHARE = 0.8
_PENALTY_MS = 500.0


def llm_d(query: PlacementQuery, loads: Sequence[PoolLoad], rng: random.Random) -> PoolLoad:
    """llm-d's rule: the worker with the fewest tokens in flight among those that hold most of the
    prompt, if there are any. The best of the other workers is chosen instead if its predicted TTFT
    is lower by more than a penalty."""
    most = (1 - _STICKY_SHARE) * query.num_tokens
    sticky = [load for load in loads if missing_tokens(query, load) <= most]
    best = _least(loads, lambda load: _tokens_in_flight(query, load), rng)
    if not sticky:
        return best
    chosen = _least(sticky, lambda load: _tokens_in_flight(query, load), rng)
    ours, theirs = (_predicted_ms(query, each) for each in (chosen, best))
    return best if ours > theirs + _PENALTY_MS else chosen


def aibrix(query: PlacementQuery, loads: Sequence[PoolLoad], rng: random.Random) -> PoolLoad:
    """AIBrix's token load: the sum of prompt tokens, 0.3 times the resident KV tokens, and 3,500
    for each request."""
    return _least(
        loads,
        lambda load: (
            load.queued_tokens
            + missing_tokens(query, load)
            + 0.3 * load.blocks_claimed * query.block_size
            + 3500 * load.num_requests
        ),
        rng,
    )


_MATCH_SHARE = 0.5
_MOST_APART, _MOST_RATIO = 64, 1.5


def sglang(query: PlacementQuery, loads: Sequence[PoolLoad], rng: random.Random) -> PoolLoad:
    """SGLang's cache-aware rule. While the loads are far apart: the worker with the fewest
    requests. Otherwise: the worker with the longest prefix if that covers half of the prompt, else
    the worker with the most room."""
    counts = [load.num_requests for load in loads]
    if max(counts) - min(counts) > _MOST_APART and max(counts) > _MOST_RATIO * min(counts):
        return least_loaded(query, loads, rng)
    best = prefix_affinity(query, loads, rng)
    if missing_tokens(query, best) <= (1 - _MATCH_SHARE) * query.num_tokens:
        return best
    return _least(loads, lambda load: (load.blocks_claimed, load.num_requests), rng)


def dynamo(query: PlacementQuery, loads: Sequence[PoolLoad], rng: random.Random) -> PoolLoad:
    """Dynamo's cost: blocks to compute plus blocks that would be active, at its default weight 1;
    ties at random."""
    size = query.block_size
    return _least(
        loads,
        lambda load: (
            (load.queued_tokens + missing_tokens(query, load)) / size
            + load.blocks_claimed
            + query.num_tokens / size
        ),
        rng,
    )


def _tokens_in_flight(query: PlacementQuery, load: PoolLoad) -> float:
    return load.queued_tokens + load.blocks_claimed * query.block_size


def _predicted_ms(query: PlacementQuery, load: PoolLoad) -> float:
    missing = missing_tokens(query, load)
    attended = attended_pairs(missing, query.num_tokens - missing)
    return load.pace.wait_ms + load.pace.prompt_ms(missing, attended)[0]


def _least(
    loads: Sequence[PoolLoad], cost: Callable[[PoolLoad], object], rng: random.Random
) -> PoolLoad:
    """The worker of the least cost; ties are broken at random."""
    costs: list[tuple[object, PoolLoad]] = [(cost(load), load) for load in loads]
    least = min(costs, key=lambda each: each[0])[0]  # type: ignore[arg-type,return-value]
    return rng.choice([load for each, load in costs if each == least])
