"""Decisions by other rules than Baton's, on the same view and with the same reservations. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from protocol.messages import Role
from router.routing.decision import Decision, Query, decide
from router.routing.fleet_view import FleetView
from router.routing.forecast import forecast
from router.routing.policy import place
from router.routing.view import Candidate, Mode, Placement, PlacementQuery, WorkerLoad
from router.routing.view import Rule as Reason
from simulator.policies.pools import Rule, least_loaded

Policy = Callable[[FleetView, Query, float, random.Random], Decision]
"""Chooses workers as `router.routing.decision.decide` does."""


def by_rule(rule: Rule) -> Policy:
    """A rule chooses who computes the prompt: a prefill worker, and then the decode worker with the
    fewest requests goes on; or, without prefill workers, the decode worker that also goes on."""

    def chosen(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
        asked, decode, prefill = _seen(view, query, now)
        decode = [each for each in decode if _fits(query, each, query.max_tokens)]
        prefill = [each for each in prefill if _fits(query, each, query.num_tokens)]
        if not decode:
            return decide(view, query, now, rng)  # which raises the error
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
        return _decision(view, query, asked, placement, decode, prefill)

    return chosen


def in_turn() -> Policy:
    """Round robin, in each pool."""
    counts = {Role.PREFILL: 0, Role.DECODE: 0}

    def next_one(
        query: PlacementQuery, loads: Sequence[WorkerLoad], rng: random.Random
    ) -> WorkerLoad:
        counts[Role.PREFILL] += 1
        return loads[counts[Role.PREFILL] % len(loads)]

    return by_rule(next_one)


def with_threshold(num_tokens: int) -> Policy:
    """Baton's costs, but a decode worker computes a prompt exactly if it lacks at most so many
    tokens of it."""

    def chosen(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
        fixed = msgspec.structs.replace(query, local_threshold_tokens=num_tokens)
        return decide(view, fixed, now, rng)

    return chosen


def never_split(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
    """Baton's costs, but prefill workers stand idle."""
    asked, decode, _ = _seen(view, query, now)
    placement = place(asked, decode, (), None, rng)
    return _decision(view, query, asked, placement, decode, ())


def _seen(
    view: FleetView, query: Query, now: float
) -> tuple[PlacementQuery, list[WorkerLoad], list[WorkerLoad]]:
    matches = view.matches(query.hashes, now)
    asked = PlacementQuery(
        num_tokens=query.num_tokens,
        max_tokens=query.max_tokens,
        block_size=query.block_size,
        session_workers=view.sessions.workers(query.session),
    )
    decode = [each.load(matches) for each in view.ready(Role.DECODE)]
    return asked, decode, [each.load(matches) for each in view.ready(Role.PREFILL)]


def _fits(query: Query, load: WorkerLoad, num_tokens: int) -> bool:
    return num_tokens <= min(load.max_context, load.blocks_total * query.block_size)


def _candidate(query: PlacementQuery, load: WorkerLoad) -> Candidate:
    """A chosen worker, with the tokens that are charged to it."""
    soon = max(load.held_blocks, load.expected_blocks)
    return Candidate(
        worker_id=load.worker_id,
        cost=0,
        load_tokens=load.queued_tokens,
        missing_tokens=_missing(query, load.held_blocks),
        recompute_tokens=_missing(query, soon),
        shortage_tokens=0,
    )


def _missing(query: PlacementQuery, num_blocks: int) -> int:
    """Tokens to compute behind cached blocks; the last token is always computed."""
    usable = min(num_blocks, (query.num_tokens - 1) // query.block_size)
    return query.num_tokens - usable * query.block_size


def _decision(
    view: FleetView,
    query: Query,
    asked: PlacementQuery,
    placement: Placement,
    decode: Sequence[WorkerLoad],
    prefill: Sequence[WorkerLoad],
) -> Decision:
    predicted = forecast(placement, asked, decode, prefill)
    return Decision(query, placement, predicted, view.version, {}, decode, prefill)
