"""Where an attempt runs: the routing policy, pure.

Takes a snapshot of the fleet and returns a decision with all its reasons. Costs are in milliseconds
(`router.routing.costs`). The rule: a request gets the cheapest pair of a prefill and a decode
worker. It is local if a decode worker holds a part of the prompt and computing the rest there costs
no more. Placements that meet the request's targets come first. So a decode worker that holds no
part of the prompt may compute it if no pair would begin in time, or if pairs would barely begin in
time and this worker much sooner. Without prefill workers every request is local. Knows no clock and
no sockets; the random generator that breaks near-ties is passed in.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from math import inf
from operator import attrgetter

from router.routing.barriers import NOBODY
from router.routing.caches.cache_index import PrefixMatch
from router.routing.candidates import decode_loads, local_candidates, prefill_candidates
from router.routing.costs import Costs, blocks_of, exposed_blocks
from router.routing.pairs import Pairs
from router.routing.placement import (
    NO_TARGETS,
    Alternative,
    Candidate,
    Mode,
    Placement,
    PlacementQuery,
    Rule,
    WorkerLoad,
)
from router.routing.prediction import US_PER_MS
from router.routing.reasons import reason_of, rule_of

NEAR_TIE = 0.05
TIE_TOKENS = 8
"""Costs are equal if they differ by at most the time to compute this many tokens."""
AMPLE_SHARE = 0.5
"""A first token that is predicted within this part of its target is in time in any case."""
PAIRED = 8
"""Number of the cheapest workers of each role that are compared pair by pair."""
NO_PAIRS = Pairs()
_name, _cost = attrgetter("worker_id"), attrgetter("cost_ms")


class Choice:
    """A placement that may be made, with its predicted cost."""

    __slots__ = ("cost_ms", "decode", "meets", "prefill", "tpot_ms", "ttft_ms")

    def __init__(
        self, query: PlacementQuery, decode: Candidate, prefill: Candidate | None, pair_ms: float
    ) -> None:
        ttft_ms, tpot_ms = decode.ttft_ms, decode.tpot_ms
        cost_ms = decode.cost_ms + pair_ms
        if prefill is not None:
            ttft_ms, cost_ms = prefill.ttft_ms, cost_ms + prefill.cost_ms
        assert ttft_ms is not None, "the worker that computes the prompt has a time"
        self.decode, self.prefill = decode, prefill
        self.cost_ms, self.ttft_ms, self.tpot_ms = cost_ms, ttft_ms, tpot_ms
        most_ttft_ms, most_tpot_ms = query.targets.ttft_ms, query.targets.tpot_ms
        self.meets = (most_ttft_ms is None or ttft_ms <= most_ttft_ms) and (
            most_tpot_ms is None or tpot_ms <= most_tpot_ms
        )


def place(
    query: PlacementQuery,
    decode: Sequence[WorkerLoad],
    prefill: Sequence[WorkerLoad],
    matches: Mapping[str, PrefixMatch],
    rng: random.Random,
    pairs: Pairs = NO_PAIRS,
) -> Placement:
    """Choose the workers of an attempt.

    Excluded decode workers are used if no other is left. Excluded prefill workers are not, because
    a decode worker can also prefill. A worker is no candidate if the prompt fits there only when
    stuck blocks return. Raises Overloaded when there is no decode worker, or none with room, and
    PromptTooLong when no decode worker could ever hold the prompt and its output.
    """
    costs = Costs(query, matches, pairs)
    prefillers = prefill_candidates(query, prefill, costs, matches) if prefill else ()
    decoders = decode_loads(query, decode, costs, matches)
    picker, alone = _Picker(query, rng, decoders), NOBODY
    if prefillers and pairs.barriers:
        prefillers, alone = pairs.barriers.able(prefillers, decoders)
    near = local_candidates(query, decoders, costs, matches, bool(prefillers), alone)
    here, pair, spare = picker.local(near), None, None
    if prefillers and not picker.is_certainly_local(here, prefillers):
        begins_ms = min([each.ttft_ms or 0.0 for each in prefillers])
        paired = [e for e in decoders if e.worker_id not in alone] if alone else decoders
        remote = costs.remote(paired, begins_ms)
        pair = picker.pair(remote, prefillers, pairs)
        if _may_overflow(query) and not (_is_ample(query, pair) or _is_ample(query, here)):
            idle = costs.local(decoders, alone=False)
            spare = picker.spare(idle, here, pair)
    best, other, tie_ms = picker.best(here, pair)
    if spare is not None:
        best, other, shown, rule = spare, best, idle, Rule.SPARE
    else:
        shown = near if best.prefill is None else remote
        rule = rule_of(query, best, here, prefill, prefillers, alone)
    return Placement(
        mode=Mode.LOCAL if best.prefill is None else Mode.REMOTE,
        decode=best.decode,
        prefill=best.prefill,
        rule=rule,
        reason=reason_of(query, rule, best, other, here, pairs.barriers),
        decode_candidates=shown,
        prefill_candidates=prefillers,
        excluded=tuple(sorted(query.exclude)) if query.exclude else (),
        cost_ms=best.cost_ms,
        ttft_ms=best.ttft_ms if _is_reported(best, decode, prefill) else None,
        tpot_ms=best.tpot_ms,
        tie_ms=tie_ms,
        meets_targets=None if query.targets == NO_TARGETS else best.meets,
        alternative=None if other is None else _alternative(other),
        left_out=pairs.barriers.text,
    )


def place_handover(
    query: PlacementQuery,
    source: str,
    decode: Sequence[WorkerLoad],
    matches: Mapping[str, PrefixMatch],
    rng: random.Random,
    pairs: Pairs = NO_PAIRS,
) -> Placement:
    """Choose the decode worker that continues from the KV of `source`; raises as `place` does."""
    costs = Costs(query, matches, pairs)
    loads = decode_loads(query, decode, costs, matches)
    candidates = costs.remote(loads, 0.0)
    picker = _Picker(query, rng, loads)
    chosen = picker.cheapest(candidates)
    tie_ms = picker.tie_ms(min([each.cost_ms for each in candidates]))
    return Placement(
        mode=Mode.HANDOVER,
        rule=Rule.DRAIN,
        decode=chosen,
        prefill=None,
        reason=f"handover: {source} drains, {chosen.worker_id} goes on with its blocks",
        decode_candidates=candidates,
        prefill_candidates=(),
        excluded=tuple(sorted(query.exclude)),
        cost_ms=chosen.cost_ms,
        tpot_ms=chosen.tpot_ms,
        tie_ms=tie_ms,
    )


class _Picker:
    """Chooses among candidates. Of near-ties, a worker of the session wins, else one at random, so
    that routers do not herd."""

    def __init__(
        self, query: PlacementQuery, rng: random.Random, decode: Sequence[WorkerLoad]
    ) -> None:
        self._query = query
        self._rng = rng
        idle_ms = token_us = inf
        for each in decode:  # quicker than `min` over an attrgetter of dotted names
            pace = each.pace
            idle_ms = pace.idle_ms if pace.idle_ms < idle_ms else idle_ms
            token_us = pace.per_token_us if pace.per_token_us < token_us else token_us
        self._idle_ms = query.output_tokens * idle_ms
        self._least_tie_ms = TIE_TOKENS * token_us / US_PER_MS

    def tie_ms(self, cost_ms: float) -> float:
        """By how many milliseconds a placement may exceed the best cost, `cost_ms`, and still count
        as equal. The time of an output on an idle worker is in every cost, so it is left out."""
        return self._least_tie_ms + NEAR_TIE * max(0.0, cost_ms - self._idle_ms)

    def best(self, here: Choice | None, pair: Choice | None) -> tuple[Choice, Choice | None, float]:
        """The better of the best local choice and the best pair, then the other one, then the
        difference that counts as a tie. A near-tie is local, because no KV moves then."""
        if pair is None or here is None:
            best = pair or here
            assert best is not None, "without prefill workers any decode worker may compute it"
            return best, None, self.tie_ms(best.cost_ms)
        tie_ms = self.tie_ms(min(here.cost_ms, pair.cost_ms))
        if here.meets is not pair.meets:
            is_local = here.meets
        else:
            is_local = here.cost_ms <= pair.cost_ms + tie_ms
        return (here, pair, tie_ms) if is_local else (pair, here, tie_ms)

    def is_certainly_local(self, here: Choice | None, prefill: Sequence[Candidate]) -> bool:
        """Whether no pair can be better, because its cheaper half alone already costs more."""
        if here is None or not here.meets:
            return False
        return here.cost_ms - self._idle_ms <= min([each.cost_ms for each in prefill])

    def local(self, candidates: Sequence[Candidate]) -> Choice | None:
        """The best decode worker among those that may compute the prompt."""
        if not candidates:
            return None
        query = self._query
        if query.targets is not NO_TARGETS and len(candidates) > 1:
            candidates = _timely(query, candidates) or candidates
            candidates = _quick(query, candidates) or candidates
        return Choice(query, self.cheapest(candidates), None, 0.0)

    def spare(
        self, candidates: Sequence[Candidate], here: Choice | None, pair: Choice | None
    ) -> Choice | None:
        """The best candidate that meets the targets; None if no candidate does, or if the usual
        choices, `here` and `pair`, are soon enough."""
        best = self.local(_timely(self._query, candidates))
        if best is None or not best.meets or _is_sooner(here, best) or _is_sooner(pair, best):
            return None
        return best

    def pair(
        self,
        decode: Sequence[Candidate],
        prefill: Sequence[Candidate],
        pairs: Pairs,
    ) -> Choice:
        """The best pair that can hand over; there is one."""
        if not pairs.barriers:
            return self._free_pair(decode, prefill, pairs)
        parts = pairs.barriers.islands(prefill, decode)
        found = [self._free_pair(sinks, sources, pairs) for sources, sinks in parts]
        query = self._query
        if query.prefer_decode is not None:
            found = [e for e in found if _sink(e) == query.prefer_decode] or found
        found = [each for each in found if each.meets] or found
        limit = min([each.cost_ms for each in found])
        limit += self.tie_ms(limit)
        near = [each for each in found if each.cost_ms <= limit]
        if query.session_workers:
            near = [each for each in near if _sink(each) in query.session_workers] or near
        near.sort(key=_sink)
        return self._rng.choice(near)

    def _free_pair(
        self,
        decode: Sequence[Candidate],
        prefill: Sequence[Candidate],
        pairs: Pairs,
    ) -> Choice:
        """The best pair of workers of which any two can hand over. Its cost is the sum of its
        workers' costs, corrected if the speed between them is known to differ from the usual."""
        query = self._query
        timely, quick = prefill, decode
        if query.targets is not NO_TARGETS:
            timely = _timely(query, prefill) or prefill
            quick = _quick(query, decode) or decode
        usual = pairs.usual_ms_per_block
        if usual is None or query.by_load:
            return Choice(query, self.cheapest(quick), self.cheapest(timely), 0.0)
        if query.prefer_decode is not None:
            quick = [e for e in quick if e.worker_id == query.prefer_decode] or quick
        near = self._near_pairs(
            sorted(self._first(timely), key=_cost), sorted(self._first(quick), key=_cost), pairs
        )
        names = query.session_workers
        if names:
            served = [(sink in names) + (source in names) for sink, source, *_ in near]
            most = max(served)
            near = [each for each, num in zip(near, served, strict=True) if num == most]
        near.sort()  # by name, which is unique
        _, _, sink, source, extra_ms, _ = self._rng.choice(near)
        return Choice(query, sink, source, extra_ms)

    def _near_pairs(
        self, prefill: Sequence[Candidate], decode: Sequence[Candidate], pairs: Pairs
    ) -> list[tuple[str, str, Candidate, Candidate, float, float]]:
        """The pairs that count as the cheapest one: sink, source, the time that the KV takes longer
        between them than usually, and their cost. The candidates are in the order of their costs,
        so that a pair that is too dear even if its KV moves at once ends the search of its sink."""
        query, usual, found = self._query, pairs.usual_ms_per_block or 0.0, []
        least_ms, limit, now = inf, inf, pairs.now
        in_windows = pairs.in_windows(blocks_of(query))
        sources = [(each.worker_id, each.cost_ms, each) for each in prefill]
        for sink in decode:
            sink_name, sink_ms = sink.worker_id, sink.cost_ms
            blocks = exposed_blocks(sink.recompute_tokens, query.block_size) + in_windows
            known, usual_ms = pairs.of_sink(sink_name), blocks * usual
            for name, source_ms, source in sources:
                cost_ms, extra_ms, pair = sink_ms + source_ms, 0.0, known.get(name)
                if cost_ms - usual_ms > limit:
                    break
                if pair is not None:
                    extra_ms = pair.transfer_ms(blocks, usual, now) - usual_ms
                    cost_ms += extra_ms
                if cost_ms > limit:
                    continue
                if cost_ms < least_ms:
                    least_ms, limit = cost_ms, cost_ms + self.tie_ms(cost_ms)
                found.append((sink_name, name, sink, source, extra_ms, cost_ms))
        return [each for each in found if each[-1] <= limit]

    def cheapest(self, candidates: Sequence[Candidate]) -> Candidate:
        """The preferred or cheapest candidate."""
        if len(candidates) == 1:
            return candidates[0]
        preferred, served = self._query.prefer_decode, self._query.session_workers
        if preferred is not None:
            for each in candidates:
                if each.worker_id == preferred:
                    return each
        limit = min([each.cost_ms for each in candidates])
        limit += self.tie_ms(limit + (0.0 if candidates[0].tpot_ms else self._idle_ms))
        near = [each for each in candidates if each.cost_ms <= limit]
        if served:
            near = [each for each in near if each.worker_id in served] or near
        near.sort(key=_name)
        return self._rng.choice(near)

    def _first(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The cheapest candidates; equal ones are shuffled."""
        if len(candidates) <= PAIRED:
            return candidates
        in_order = sorted(candidates, key=_name)
        ranked = sorted([(e.cost_ms, self._rng.random(), e.worker_id, e) for e in in_order])
        return [each for *_, each in ranked[:PAIRED]]


def _sink(choice: Choice) -> str:
    return choice.decode.worker_id


def _timely(query: PlacementQuery, computing: Sequence[Candidate]) -> Sequence[Candidate]:
    """The workers that would give the first token within the target."""
    target = query.targets.ttft_ms
    if target is None:
        return computing
    return [each for each in computing if each.ttft_ms is None or each.ttft_ms <= target]


def _quick(query: PlacementQuery, decode: Sequence[Candidate]) -> Sequence[Candidate]:
    """The decode workers whose tokens would come within the target."""
    target = query.targets.tpot_ms
    return decode if target is None else [each for each in decode if each.tpot_ms <= target]


def _is_ample(query: PlacementQuery, choice: Choice | None) -> bool:
    """Whether a placement meets the targets with time to spare for errors of the prediction."""
    target = query.targets.ttft_ms
    if choice is None or not choice.meets:
        return False
    return target is None or choice.ttft_ms <= AMPLE_SHARE * target


def _is_sooner(choice: Choice | None, spare: Choice) -> bool:
    """Whether a placement meets the targets, and takes at most twice as long for the first token as
    a spare decode worker, whose running requests would be disturbed."""
    return choice is not None and choice.meets and choice.ttft_ms <= 2 * spare.ttft_ms


def _may_overflow(query: PlacementQuery) -> bool:
    """Whether a decode worker may compute a prompt of which it holds no part."""
    return not query.by_load and query.local_threshold_tokens is None


def _is_reported(
    choice: Choice, decode: Sequence[WorkerLoad], prefill: Sequence[WorkerLoad]
) -> bool:
    """Whether the worker that computes the prompt has reported a step model."""
    computing, loads = choice.prefill, prefill
    if computing is None:
        computing, loads = choice.decode, decode
    for each in loads:
        if each.worker_id == computing.worker_id:
            return each.speed is not None and each.speed.is_known
    return False


def _alternative(choice: Choice) -> Alternative:
    prefill = None if choice.prefill is None else choice.prefill.worker_id
    return Alternative(prefill, choice.decode.worker_id, choice.cost_ms, choice.ttft_ms)
