"""Where a request goes. `decide` reads a `FleetView`; `apply` reserves the load of the decision in
it.

Pure: the time and the random generator are arguments. Equal views, queries, times and generators
give equal decisions, whether connections or a simulator fed the view.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from router.routing.caches.cache_index import PrefixMatch
from router.routing.costs import exposed_blocks
from router.routing.fleet_view import FleetView
from router.routing.pairs import Pair
from router.routing.placement import (
    NO_TARGETS,
    USUAL_OUTPUT_TOKENS,
    Candidate,
    HeldElsewhere,
    Mode,
    Placement,
    PlacementQuery,
    Targets,
    WorkerLoad,
)
from router.routing.policy import place, place_handover
from router.routing.worker_view import Reservation, WorkerView


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A request to place: `num_tokens` so far, `max_tokens` including all output to come.

    - `hashes`: the hashes of its full blocks. Without `uses_cache` the blocks are computed even
      where a worker holds them
    - `failed`: incarnations where it failed; `only`: if it names workers of a role, no other worker
      of that role is used; `prefer_decode`: a worker that already holds some of its blocks.
    - `source`: the decode worker that hands the request over with its KV.
    - `may_fetch`: workers may fetch blocks from each other; `by_load`: only load and room decide.
    - `local_threshold_tokens`: only decode workers that lack no more tokens may compute the prompt.
    - `session`: the workers of its earlier requests win near-ties. "": it is inferred from the
      prompt. With `by_load` only a named session counts. `inferred`: the session that an earlier
      attempt inferred.
    - `output_tokens`: the expected length of the output; `targets`: what the request should meet.
    """

    num_tokens: int
    max_tokens: int
    block_size: int
    hashes: Sequence[bytes] = ()
    uses_cache: bool = True
    failed: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()
    prefer_decode: str | None = None
    source: str | None = None
    may_fetch: bool = True
    by_load: bool = False
    local_threshold_tokens: int | None = None
    session: str = ""
    inferred: str = ""
    output_tokens: int = USUAL_OUTPUT_TOKENS
    targets: Targets = NO_TARGETS


class Decision(msgspec.Struct, frozen=True):
    """A placement and its input: the request's session, each worker's part of the prompt, and the
    workers' loads."""

    query: Query
    placement: Placement
    matches: Mapping[str, PrefixMatch]
    decode_loads: Sequence[WorkerLoad]
    prefill_loads: Sequence[WorkerLoad]
    session: str = ""

    @property
    def loads(self) -> list[WorkerLoad]:
        """The loads of all workers that were considered."""
        return [*self.decode_loads, *self.prefill_loads]


def decide(view: FleetView, query: Query, now: float, rng: random.Random) -> Decision:
    """Choose the workers of an attempt; reserves nothing. `now` is the clock of the view's index.

    Raises Overloaded and PromptTooLong as `router.routing.policy.place` does.
    """
    view.pairs.now = now
    matches = view.matches(query.hashes, now) if query.uses_cache else {}
    decode, prefill = view.ready_pools()
    if query.source is not None and len(decode) > 1:
        barriers = view.pairs.barriers
        decode = [e for e in decode if not barriers.why(query.source, e.worker_id)] or decode
    decode_loads = view.loads(decode)
    prefill_loads = view.loads(prefill) if prefill and query.source is None else []
    session = query.session or query.inferred or view.sessions.inferred(query.hashes)
    asked = PlacementQuery(
        num_tokens=query.num_tokens,
        max_tokens=query.max_tokens,
        block_size=query.block_size,
        exclude=_excluded(query, (decode, prefill)) if query.failed or query.only else frozenset(),
        prefer_decode=query.prefer_decode,
        elsewhere=held_elsewhere(matches) if matches and query.may_fetch else None,
        by_load=query.by_load,
        session_workers=view.sessions.workers(query.session if query.by_load else session),
        local_threshold_tokens=query.local_threshold_tokens,
        output_tokens=query.output_tokens,
        targets=query.targets if query.prefer_decode is None else NO_TARGETS,
    )
    if query.source is None:
        placement = place(asked, decode_loads, prefill_loads, matches, rng, view.pairs)
    else:
        placement = place_handover(asked, query.source, decode_loads, matches, rng, view.pairs)
    return Decision(query, placement, matches, decode_loads, prefill_loads, session)


Charge = tuple[WorkerView | Pair, Reservation]
"""An owner of reserved load, and its reservation: `owner.release(reservation)` ends it."""


def apply(view: FleetView, decision: Decision, now: float) -> list[Charge]:
    """Reserve load and note expected blocks, so that the next decision counts this one. Blocks that
    a worker has, or will have from a prompt routed there earlier, are not charged."""
    query, placement = decision.query, decision.placement
    decode, prefill = placement.decode, placement.prefill
    charges = [_charge(view, query, decode, placement.mode is Mode.LOCAL, now)]
    source = query.source
    if prefill is not None:
        source = prefill.worker_id
        charges.append(_charge(view, query, prefill, True, now))
    if source is not None:
        pair = view.pairs.pair(source, decode.worker_id)
        blocks = exposed_blocks(decode.recompute_tokens, query.block_size)
        charges.append((pair, pair.reserve(blocks)))
    computing = None if prefill is None else prefill.worker_id
    view.sessions.note(decision.session, decode.worker_id, computing)
    if not query.session and not query.inferred:
        view.sessions.note_prompt(decision.session, query.hashes)
    view.on_applied()
    return charges


def held_elsewhere(matches: Mapping[str, PrefixMatch]) -> HeldElsewhere | None:
    """The two workers that hold the most leading blocks now, for the cost of placements."""
    most = second = 0
    holder = ""
    for name, match in matches.items():
        if match.held > most:
            most, second, holder = match.held, most, name
        elif match.held > second:
            second = match.held
    return HeldElsewhere(holder, most, second) if most else None


def _excluded(query: Query, ready: Iterable[Sequence[WorkerView]]) -> frozenset[str]:
    """The ready workers where the request failed, and those that `only` rules out."""
    excluded: set[str] = set()
    for workers in ready:
        names = {each.worker_id for each in workers}
        excluded.update(e.worker_id for e in workers if e.info.incarnation in query.failed)
        excluded.update(names - query.only if names & query.only else ())
    return frozenset(excluded)


def _charge(view: FleetView, query: Query, chosen: Candidate, computes: bool, now: float) -> Charge:
    worker = view.worker(chosen.worker_id)
    assert worker is not None, "a decision is applied to the view that it was made from"
    missing = chosen.recompute_tokens
    tokens = missing - chosen.fetch_tokens if computes else 0
    held = max(0, len(query.hashes) - -(-chosen.missing_tokens // query.block_size))
    if held < len(query.hashes):
        view.index.expect(chosen.worker_id, query.hashes[held:], now)
    return worker, worker.reserve(tokens, missing // query.block_size + 1)
