"""Where an attempt runs: the routing policy, pure.

Takes a snapshot of the fleet and returns a decision with all its reasons. Costs are in tokens of
prefill work, so that queues, missing prefixes and memory shortage add up in one unit. The missing
tokens of a worker split into those that it can fetch from another one, which cost little, and those
that it must compute. The rule: the cheapest pair of a prefill and a decode worker; but local if a
decode worker holds a part of the prompt and computing the rest there costs no more. Prompt tokens
cost more on a decode worker, because they slow down the requests that run there. Without prefill
workers every request is local. Knows no clock and no sockets;
the random generator that breaks near-ties is passed in.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from process.figures import count, integer
from protocol.errors import Overloaded, PromptTooLong
from router.routing.view import Candidate, Mode, Placement, PlacementQuery, Rule, WorkerLoad

REQUEST_COST_TOKENS = 16
"""A waiting or running request costs a worker about as much as this many prompt tokens."""
RECOMPUTE_WEIGHT = 1.25
"""Above 1: recomputing a cached token costs the fleet work, waiting costs only time."""
TRANSFER_WEIGHT = 0.125
"""The cost of moving a token's KV, relative to computing it."""
LOCAL_WEIGHT = 1.5
"""The cost of computing a prompt token on a decode worker: more than on a prefill worker, with the
transfer to the decode worker."""
DISTURBANCE_WEIGHT = 0.125
"""What each request that waits or runs on a decode worker adds to the cost of a token there."""
SHORT_PROMPT_TOKENS = 32
"""A prompt of so few tokens may be local although nobody holds a part of it."""
NEAR_TIE = 0.05
RETRY_STUCK_S = 5
"""When a caller may ask again, if only stuck blocks stand in the way."""


def place(
    query: PlacementQuery,
    decode: Sequence[WorkerLoad],
    prefill: Sequence[WorkerLoad],
    local_threshold_tokens: int | None,
    rng: random.Random,
) -> Placement:
    """Choose the workers of an attempt. With a `local_threshold_tokens`, only decode workers that
    lack no more tokens may compute the prompt while a prefill worker can.

    Excluded decode workers are used if no other is left. Excluded prefill workers are not, because
    a decode worker can also prefill. A worker is no candidate if the prompt fits there only when
    stuck blocks return. Raises Overloaded when there is no decode worker, or none with room, and
    PromptTooLong when no decode worker could ever hold the prompt and its output.
    """
    prefillers = [
        _weigh(query, each, RECOMPUTE_WEIGHT)
        for each in prefill
        if _may_prefill(query, each) and each.worker_id not in query.exclude
    ]
    decoders = _decode_loads(query, decode)
    threshold = local_threshold_tokens if prefillers else query.num_tokens
    here, candidates = _local(query, decoders, threshold, rng)
    chosen, source = here, None
    if prefillers and (here is None or here.cost > min(each.cost for each in prefillers)):
        remote = tuple([_weigh(query, each, TRANSFER_WEIGHT) for each in decoders])
        pair = _pick(query, remote, rng), _pick(query, prefillers, rng)
        if here is None or here.cost > tie_limit(pair[0].cost + pair[1].cost):
            candidates, (chosen, source) = remote, pair
    assert chosen is not None, "without prefill workers any decode worker may compute the prompt"
    rule = _rule(chosen, source, bool(prefill), here, local_threshold_tokens)
    if source is None and local_threshold_tokens is None and prefillers:
        rule = Rule.NEAR
    return Placement(
        mode=Mode.LOCAL if source is None else Mode.REMOTE,
        decode=chosen,
        prefill=source,
        rule=rule,
        reason=_reason(rule, chosen, source, here, local_threshold_tokens),
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
        rule=Rule.DRAIN,
        decode=chosen,
        prefill=None,
        reason=f"handover: {source} drains, {chosen.worker_id} goes on with its blocks",
        decode_candidates=tuple(candidates),
        prefill_candidates=(),
        excluded=tuple(sorted(query.exclude)),
    )


def _local(
    query: PlacementQuery,
    decode: Sequence[WorkerLoad],
    threshold: int | None,
    rng: random.Random,
) -> tuple[Candidate | None, tuple[Candidate, ...]]:
    """The best worker among those that may compute the prompt, and all local candidates. None, and
    no candidates, if no worker may."""
    if threshold is None:
        may = {each.worker_id for each in decode if each.held_blocks or _is_short(query)}
        if query.by_load or not may:
            return None, ()
        candidates = tuple([_weigh(query, each, _local_weight(each)) for each in decode])
        return _pick(query, [each for each in candidates if each.worker_id in may], rng), candidates
    most_held = max([each.held_blocks for each in decode])
    if _missing(query, most_held) > threshold:
        return None, ()
    candidates = tuple([_weigh(query, each, RECOMPUTE_WEIGHT) for each in decode])
    near = [each for each in candidates if each.missing_tokens <= threshold]
    return _pick(query, near, rng), candidates


def _local_weight(load: WorkerLoad) -> float:
    """The cost of computing a prompt token on a decode worker that prefill workers could help."""
    return LOCAL_WEIGHT + DISTURBANCE_WEIGHT * load.num_requests


def _is_short(query: PlacementQuery) -> bool:
    return query.num_tokens <= SHORT_PROMPT_TOKENS


def _decode_loads(query: PlacementQuery, decode: Sequence[WorkerLoad]) -> list[WorkerLoad]:
    """Decode workers that may run the request."""
    if not decode:
        raise Overloaded("no decode worker is ready")
    num_blocks = _blocks(query)
    fitting = [
        each
        for each in decode
        if num_blocks <= each.blocks_total and query.max_tokens <= each.max_context
    ]
    if not fitting:
        capacity = max(each.blocks_total for each in decode) * query.block_size
        if query.num_tokens > capacity:
            raise PromptTooLong(
                capacity,
                query.num_tokens,
                reason=f"The largest KV pool of this service holds {count(capacity, 'token')}.",
            )
        limit = max(min(each.max_context, each.blocks_total * query.block_size) for each in decode)
        raise PromptTooLong(
            limit,
            query.num_tokens,
            query.max_tokens - query.num_tokens,
            reason="No ready decode worker accepts that many tokens.",
        )
    roomy = [each for each in fitting if _has_room(num_blocks, each)]
    if not roomy:
        raise Overloaded(
            f"the prompt needs {count(num_blocks, 'KV block')}, and no decode worker has so "
            "many beside those that workers which do not answer may still write to",
            RETRY_STUCK_S,
        )
    if not query.exclude:
        return roomy
    return [each for each in roomy if each.worker_id not in query.exclude] or roomy


def _may_prefill(query: PlacementQuery, load: WorkerLoad) -> bool:
    """Whether a prefill worker accepts the prompt; the output runs elsewhere."""
    num_blocks = _blocks(query)
    fits = num_blocks <= load.blocks_total and query.num_tokens <= load.max_context
    return fits and _has_room(num_blocks, load)


def _has_room(num_blocks: int, load: WorkerLoad) -> bool:
    """Whether a prompt of `num_blocks` may fit even if the worker's stuck blocks never return. Its
    cached prefix may lie in these blocks; if it does not, the worker gives the request back."""
    return num_blocks - load.held_blocks <= load.blocks_total - load.blocks_stuck


def _blocks(query: PlacementQuery) -> int:
    return -(-query.num_tokens // query.block_size)


def _missing(query: PlacementQuery, cached_blocks: int) -> int:
    """Tokens to compute. The last token is always computed, because its logits are needed."""
    usable = min(cached_blocks, (query.num_tokens - 1) // query.block_size)
    return query.num_tokens - usable * query.block_size


def _weigh(query: PlacementQuery, load: WorkerLoad, weight: float) -> Candidate:
    """The cost of a worker; `weight` is the cost of a token that is not in its cache."""
    load_tokens = load.queued_tokens + load.num_requests * REQUEST_COST_TOKENS
    missing = recompute = _missing(query, load.held_blocks)
    if load.expected_blocks > load.held_blocks:
        recompute = _missing(query, load.expected_blocks)
    fetched = 0
    if query.elsewhere is not None and weight > TRANSFER_WEIGHT:  # who computes may fetch
        fetched = _fetched(query, query.elsewhere.beside(load.worker_id), recompute)
    cost = weight * (recompute - fetched) + TRANSFER_WEIGHT * fetched
    if query.by_load:
        cost = 0
    free = load.blocks_total - load.blocks_claimed
    shortage = max(0, _blocks(query) - load.held_blocks - free) * query.block_size
    return Candidate(
        worker_id=load.worker_id,
        cost=round(load_tokens + cost + shortage),
        load_tokens=load_tokens,
        missing_tokens=missing,
        recompute_tokens=recompute,
        shortage_tokens=shortage,
        fetch_tokens=fetched,
    )


def _fetched(query: PlacementQuery, held_elsewhere: int, missing: int) -> int:
    """Of the tokens that a worker lacks, those that it can fetch from another one."""
    return max(0, missing - _missing(query, held_elsewhere))


def _pick(query: PlacementQuery, candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    """The preferred or cheapest candidate. Of near-ties, a worker of the session wins, else one at
    random, so routers do not herd."""
    if len(candidates) == 1:
        return candidates[0]
    for each in candidates:
        if each.worker_id == query.prefer_decode:
            return each
    limit = tie_limit(min([each.cost for each in candidates]))
    near = [each for each in candidates if each.cost <= limit]
    of_session = [each for each in near if each.worker_id in query.session_workers]
    return rng.choice(of_session or near)


def tie_limit(best: float) -> float:
    """The highest cost that is as good as the best one."""
    return best + max(NEAR_TIE * best, REQUEST_COST_TOKENS / 2)


def _rule(
    chosen: Candidate,
    prefill: Candidate | None,
    has_prefill: bool,
    near: Candidate | None,
    threshold: int | None,
) -> Rule:
    if prefill is not None:
        return Rule.NOT_CACHED if near is None else Rule.LOADED
    if threshold is not None and chosen.missing_tokens <= threshold:
        return Rule.NEAR
    return Rule.PREFILL_UNFIT if has_prefill else Rule.NO_PREFILL


def _reason(
    rule: Rule,
    chosen: Candidate,
    prefill: Candidate | None,
    near: Candidate | None,
    threshold: int | None,
) -> str:
    """The rule in words; `near` is the best worker that holds a part of the prompt."""
    if rule is Rule.LOADED and near is not None and prefill is not None:
        return (
            f"remote: {near.worker_id} lacks {count(near.missing_tokens, 'token')} at a cost of "
            f"{integer(near.cost)}; {prefill.worker_id} and {chosen.worker_id} cost less"
        )
    if rule is Rule.NEAR:
        told = "which cost least there"
        if threshold is not None:
            told = f"at most {integer(threshold)} are prefilled there"
        lacks = count(chosen.missing_tokens, "token")
        return f"local: {chosen.worker_id} lacks {lacks}, {told}"
    if rule is Rule.NO_PREFILL:
        return "local: no prefill worker is ready"
    if rule is Rule.PREFILL_UNFIT:
        return "local: no prefill worker may take it"
    if threshold is None:
        return "remote: no decode worker holds a part of the prompt"
    return f"remote: no decode worker holds all but {count(threshold, 'token')} of the prompt"
