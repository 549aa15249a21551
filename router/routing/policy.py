"""Where an attempt runs: the routing policy, pure.

Takes a snapshot of the fleet and returns a decision with all its reasons. Costs are in tokens of
prefill work, so that queues, missing prefixes and memory shortage add up in one unit. The rule:
local if a decode worker already holds all of the prompt except at most a threshold; otherwise
remote, on the cheapest pair, counting load and prefix hits. Without prefill workers every request
is local. Knows no clock and no sockets; the random generator that breaks near-ties is passed in.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from protocol.errors import Overloaded, PromptTooLong
from router.routing.view import Candidate, Mode, Placement, PlacementQuery, WorkerLoad

REQUEST_COST_TOKENS = 16
"""A waiting or running request costs a worker about as much as this many prompt tokens."""
RECOMPUTE_WEIGHT = 1.25
"""Above 1: recomputing a cached token costs the fleet work, waiting costs only time."""
TRANSFER_WEIGHT = 0.125
"""The cost of moving a token's KV, relative to computing it."""
NEAR_TIE = 0.05


def place(
    query: PlacementQuery,
    decode: Sequence[WorkerLoad],
    prefill: Sequence[WorkerLoad],
    local_threshold_tokens: int,
    rng: random.Random,
) -> Placement:
    """Choose the workers of an attempt.

    Excluded decode workers are used after all if no other is left. Excluded prefill workers are
    not, because a decode worker can also prefill. Raises Overloaded when there is no decode
    worker, PromptTooLong when no decode worker could ever hold the prompt and its output.
    """
    prefillers = [
        _weigh(query, each, RECOMPUTE_WEIGHT)
        for each in prefill
        if _fits(query, each) and each.worker_id not in query.exclude
    ]
    decoders = _decode_loads(query, decode)
    is_near = any(_missing(query, each.held_blocks) <= local_threshold_tokens for each in decoders)
    mode = Mode.LOCAL if is_near or not prefillers else Mode.REMOTE
    weight = RECOMPUTE_WEIGHT if mode is Mode.LOCAL else TRANSFER_WEIGHT
    candidates = tuple([_weigh(query, each, weight) for each in decoders])
    near = [each for each in candidates if each.missing_tokens <= local_threshold_tokens]
    chosen = _pick(query, near or candidates, rng)
    return Placement(
        mode=mode,
        decode=chosen,
        prefill=_pick(query, prefillers, rng) if mode is Mode.REMOTE else None,
        reason=_reason(mode, chosen, bool(prefill), is_near, local_threshold_tokens),
        decode_candidates=candidates,
        prefill_candidates=tuple(prefillers),
        excluded=tuple(sorted(query.exclude)),
    )


def place_handover(
    query: PlacementQuery, source: str, decode: Sequence[WorkerLoad], rng: random.Random
) -> Placement:
    """Choose the decode worker that continues from the KV of `source`; raises as `place` does."""
    loads = _decode_loads(query, decode)
    candidates = [_weigh(query, each, TRANSFER_WEIGHT) for each in loads]
    chosen = _pick(query, candidates, rng)
    return Placement(
        mode=Mode.HANDOVER,
        decode=chosen,
        prefill=None,
        reason=f"handover: {source} drains, {chosen.worker_id} goes on with its blocks",
        decode_candidates=tuple(candidates),
        prefill_candidates=(),
        excluded=tuple(sorted(query.exclude)),
    )


def _decode_loads(query: PlacementQuery, decode: Sequence[WorkerLoad]) -> list[WorkerLoad]:
    """Decode workers that may take the request."""
    if not decode:
        raise Overloaded("no decode worker is ready")
    fitting = [each for each in decode if _fits(query, each)]
    if not fitting:
        capacity = max(each.blocks_total for each in decode) * query.block_size
        if query.num_tokens > capacity:
            raise PromptTooLong(
                f"the prompt has {query.num_tokens} tokens, but the largest KV pool of this "
                f"service holds {capacity}"
            )
        raise PromptTooLong(
            f"prompt and output may have {query.max_tokens} tokens, but no decode worker that is "
            "ready takes so many"
        )
    return [each for each in fitting if each.worker_id not in query.exclude] or fitting


def _fits(query: PlacementQuery, load: WorkerLoad) -> bool:
    return _blocks(query) <= load.blocks_total and query.max_tokens <= load.max_context


def _blocks(query: PlacementQuery) -> int:
    return -(-query.num_tokens // query.block_size)


def _missing(query: PlacementQuery, cached_blocks: int) -> int:
    """Tokens to compute. The last one is always computed, because its logits are needed."""
    usable = min(cached_blocks, (query.num_tokens - 1) // query.block_size)
    return query.num_tokens - usable * query.block_size


def _weigh(query: PlacementQuery, load: WorkerLoad, weight: float) -> Candidate:
    """The cost of a worker; `weight` is the cost of a token that is not in its cache."""
    load_tokens = load.queued_tokens + load.num_requests * REQUEST_COST_TOKENS
    recompute = _missing(query, max(load.held_blocks, load.expected_blocks))
    free = load.blocks_total - load.blocks_used
    shortage = max(0, _blocks(query) - load.held_blocks - free) * query.block_size
    return Candidate(
        worker_id=load.worker_id,
        cost=round(load_tokens + weight * recompute + shortage),
        load_tokens=load_tokens,
        missing_tokens=_missing(query, load.held_blocks),
        recompute_tokens=recompute,
        shortage_tokens=shortage,
    )


def _pick(query: PlacementQuery, candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    """The preferred or cheapest candidate; near-ties break at random, so routers do not herd."""
    for each in candidates:
        if each.worker_id == query.prefer_decode:
            return each
    best = min(each.cost for each in candidates)
    limit = best + max(NEAR_TIE * best, REQUEST_COST_TOKENS / 2)
    return rng.choice([each for each in candidates if each.cost <= limit])


def _reason(mode: Mode, chosen: Candidate, has_prefill: bool, is_near: bool, threshold: int) -> str:
    if is_near:
        return (
            f"local: {chosen.worker_id} lacks {chosen.missing_tokens} tokens, "
            f"at most {threshold} are prefilled there"
        )
    if mode is Mode.LOCAL:
        return "local: no prefill worker " + ("may take it" if has_prefill else "is ready")
    return f"remote: no decode worker holds all but {threshold} tokens of the prompt"
