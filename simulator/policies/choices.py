"""Decisions by other rules than Baton's, on the same view and with the same reservations. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from protocol.messages import Role
from router.routing.caches.cache_index import NO_MATCH, PrefixMatch
from router.routing.decision import Decision, Query, decide
from router.routing.fleet_view import FleetView
from router.routing.placement import Candidate, Mode, Placement, PlacementQuery, WorkerLoad
from router.routing.placement import Rule as Reason
from router.routing.policy import place
from simulator.policies.pools import PoolLoad, Rule, least_loaded

Policy = Callable[[FleetView, Query, float, random.Random], Decision]
"""Chooses workers as `router.routing.decision.decide` does."""


def by_rule(rule: Rule) -> Policy:
    """A rule chooses the worker that computes the prompt: a prefill worker, after which the decode
    worker with the fewest requests continues; or, without prefill workers, a decode worker, which
    also continues."""

    def chosen(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
        asked, matches = _asked(view, query), view.matches(query.hashes, now)
        loads = {role: view.loads(view.ready(role)) for role in Role}
        decode = _able(query, loads[Role.DECODE], matches, query.max_tokens)
        prefill = _able(query, loads[Role.PREFILL], matches, query.num_tokens)
        if not decode:
            return decide(view, query, now, rng)  # `decide` raises the error
        source = rule(asked, prefill, rng) if prefill else None
        target = rule(asked, decode, rng) if source is None else least_loaded(asked, decode, rng)
        placement = Placement(
            mode=Mode.LOCAL if source is None else Mode.REMOTE,
            decode=_candidate(asked, target),
            prefill=None if source is None else _candidate(asked, source),
            reason="",
            decode_candidates=(),
            prefill_candidates=(),
            excluded=(),
            rule=Reason.NO_PREFILL if source is None else Reason.NOT_CACHED,
        )
        return Decision(
            query, placement, matches, loads[Role.DECODE], loads[Role.PREFILL], query.session
        )  # fmt: skip

    return chosen


def in_turn() -> Policy:
    """Round robin, in each pool."""
    counts = {Role.PREFILL: 0, Role.DECODE: 0}

    def next_one(query: PlacementQuery, loads: Sequence[PoolLoad], rng: random.Random) -> PoolLoad:
        counts[Role.PREFILL] += 1
        return loads[counts[Role.PREFILL] % len(loads)]

    return by_rule(next_one)


def with_threshold(num_tokens: int) -> Policy:
    """Baton's costs, but a decode worker computes exactly those prompts of which it lacks at most
    `num_tokens`."""

    def chosen(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
        fixed = msgspec.structs.replace(query, local_threshold_tokens=num_tokens)
        return decide(view, fixed, now, rng)

    return chosen


def never_split(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
    """Baton's costs, but no prompt goes to a prefill worker."""
    matches, decode = view.matches(query.hashes, now), view.loads(view.ready(Role.DECODE))
    placement = place(_asked(view, query), decode, (), matches, rng)
    return Decision(query, placement, matches, decode, (), query.session)


def _asked(view: FleetView, query: Query) -> PlacementQuery:
    return PlacementQuery(
        num_tokens=query.num_tokens,
        max_tokens=query.max_tokens,
        block_size=query.block_size,
        session_workers=view.sessions.workers(query.session),
        output_tokens=query.output_tokens,
    )


def _able(
    query: Query, loads: Sequence[WorkerLoad], matches: Mapping[str, PrefixMatch], num_tokens: int
) -> list[PoolLoad]:
    """The workers where `num_tokens` fit, with the part of the prompt that each holds."""
    found = []
    for load in loads:
        if num_tokens <= min(load.max_context, load.blocks_total * query.block_size):
            match = matches.get(load.worker_id, NO_MATCH)
            found.append(
                PoolLoad(
                    load.worker_id, load.num_requests, load.queued_tokens, load.blocks_total,
                    load.blocks_claimed, load.max_context, match.held, match.expected, load.pace,
                )
            )  # fmt: skip
    return found


def _candidate(query: PlacementQuery, load: PoolLoad) -> Candidate:
    """A chosen worker, with the tokens that are charged to it."""
    soon = max(load.held_blocks, load.expected_blocks)
    return Candidate(
        worker_id=load.worker_id,
        cost_ms=0.0,
        missing_tokens=_missing(query, load.held_blocks),
        recompute_tokens=_missing(query, soon),
    )


def _missing(query: PlacementQuery, num_blocks: int) -> int:
    """Tokens to compute behind cached blocks; the last token is always computed."""
    usable = min(num_blocks, (query.num_tokens - 1) // query.block_size)
    return query.num_tokens - usable * query.block_size
