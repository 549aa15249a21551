"""The workers that may compute a prompt or run a request. Pure.

A worker is left out if the request is too long for it, or if the prompt fits there only when stuck
blocks return. A prompt that no worker can take is refused here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from process.number_text import count
from protocol.errors import Overloaded, PromptTooLong
from router.routing.caches.cache_index import NO_MATCH, PrefixMatch
from router.routing.costs import Costs
from router.routing.placement import Candidate, PlacementQuery, WorkerLoad

SHORT_PROMPT_TOKENS = 32
"""A prompt of at most this length may be local although no decode worker holds a part of it."""
RETRY_STUCK_S = 5
"""The Retry-After, in seconds, if only stuck blocks keep a request from being placed."""


def prefill_candidates(
    query: PlacementQuery,
    prefill: Sequence[WorkerLoad],
    costs: Costs,
    matches: Mapping[str, PrefixMatch],
) -> tuple[Candidate, ...]:
    """The prefill workers that may compute the prompt; the output runs elsewhere."""
    num_blocks, num_tokens, exclude = costs.num_blocks, query.num_tokens, query.exclude
    able = [
        each
        for each in prefill
        if num_tokens <= each.max_context
        and num_blocks <= each.blocks_total
        and (not each.blocks_stuck or _has_room(num_blocks, each, matches))
        and each.worker_id not in exclude
    ]
    return costs.prefill(able)


def local_candidates(
    query: PlacementQuery,
    decode: Sequence[WorkerLoad],
    costs: Costs,
    matches: Mapping[str, PrefixMatch],
    has_prefill: bool,
    alone: Collection[str] = (),
) -> tuple[Candidate, ...]:
    """The decode workers that may compute the prompt itself. No prefill worker can hand over to
    those in `alone`."""
    threshold = query.local_threshold_tokens
    if not has_prefill:
        able = decode
    elif threshold is not None:
        held = [matches.get(each.worker_id, NO_MATCH).held for each in decode]
        if costs.missing(max(held)) > threshold:
            return ()
        able = [e for e, num in zip(decode, held, strict=True) if costs.missing(num) <= threshold]
    elif query.by_load:
        return ()
    elif query.num_tokens <= SHORT_PROMPT_TOKENS:
        able = decode
    else:
        own = {name for name, match in matches.items() if match.num_own}
        able = [each for each in decode if each.worker_id in own] if own else []
        if alone:
            near = {each.worker_id for each in able}.union(alone)
            able = [each for each in decode if each.worker_id in near]
    return costs.local(able, not has_prefill)


def decode_loads(
    query: PlacementQuery,
    decode: Sequence[WorkerLoad],
    costs: Costs,
    matches: Mapping[str, PrefixMatch],
) -> list[WorkerLoad]:
    """Decode workers that may run the request."""
    if not decode:
        raise Overloaded("no decode worker is ready")
    num_blocks, max_tokens = costs.num_blocks, query.max_tokens
    roomy = [
        each
        for each in decode
        if max_tokens <= each.max_context and num_blocks <= each.blocks_total - each.blocks_stuck
    ]
    if len(roomy) < len(decode):
        roomy = _with_room(query, decode, num_blocks, matches)
    if not query.exclude:
        return roomy
    return [each for each in roomy if each.worker_id not in query.exclude] or roomy


def _with_room(
    query: PlacementQuery,
    decode: Sequence[WorkerLoad],
    num_blocks: int,
    matches: Mapping[str, PrefixMatch],
) -> list[WorkerLoad]:
    """The decode workers that have room for the request. Raises as `place` does."""
    fitting = [
        each
        for each in decode
        if num_blocks <= each.blocks_total and query.max_tokens <= each.max_context
    ]
    if not fitting:
        raise _too_long(query, decode)
    roomy = [each for each in fitting if _has_room(num_blocks, each, matches)]
    if not roomy:
        raise Overloaded(
            f"the prompt needs {count(num_blocks, 'KV block')}, and no decode worker has as "
            "many besides the blocks that silent workers may still write to",
            RETRY_STUCK_S,
        )
    return roomy


def _too_long(query: PlacementQuery, decode: Sequence[WorkerLoad]) -> PromptTooLong:
    capacity = max(each.blocks_total for each in decode) * query.block_size
    if query.num_tokens > capacity:
        return PromptTooLong(
            capacity,
            query.num_tokens,
            reason=f"The largest KV pool of this service holds {count(capacity, 'token')}.",
        )
    limit = max(min(each.max_context, each.blocks_total * query.block_size) for each in decode)
    return PromptTooLong(
        limit,
        query.num_tokens,
        query.max_tokens - query.num_tokens,
        reason="No ready decode worker accepts that many tokens.",
    )


def _has_room(num_blocks: int, load: WorkerLoad, matches: Mapping[str, PrefixMatch]) -> bool:
    """Whether a prompt of `num_blocks` may fit even if the worker's stuck blocks never return. Its
    cached prefix may lie in these blocks; if it does not, the worker gives the request back."""
    room = load.blocks_total - load.blocks_stuck
    return num_blocks <= room or num_blocks - matches.get(load.worker_id, NO_MATCH).held <= room
