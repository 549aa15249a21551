"""The rule that decided a placement, and its reason in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from process.number_text import count, ms
from router.routing.barriers import Barriers
from router.routing.placement import Candidate, PlacementQuery, Rule


class Chosen(Protocol):
    """A placement that may be made: a pair, or a decode worker alone."""

    @property
    def decode(self) -> Candidate: ...
    @property
    def prefill(self) -> Candidate | None: ...
    @property
    def cost_ms(self) -> float: ...
    @property
    def ttft_ms(self) -> float: ...


def rule_of(
    query: PlacementQuery,
    best: Chosen,
    near: Chosen | None,
    ready: Sequence[object],
    able: Sequence[object],
    alone: Collection[str],
) -> Rule:
    """The rule; `near` is the best decode worker that may compute the prompt itself. Of the
    `ready` prefill workers, those `able` may take it, but none can hand over to those `alone`."""
    threshold = query.local_threshold_tokens
    if best.prefill is not None:
        return Rule.NOT_CACHED if near is None else Rule.LOADED
    if best.decode.worker_id in alone:
        return Rule.APART
    if able or (threshold is not None and best.decode.missing_tokens <= threshold):
        return Rule.NEAR
    return Rule.PREFILL_UNFIT if ready else Rule.NO_PREFILL


def reason_of(
    query: PlacementQuery,
    rule: Rule,
    best: Chosen,
    other: Chosen | None,
    near: Chosen | None,
    barriers: Barriers,
) -> str:
    """The rule in words. `other` is the best placement of the other kind."""
    fixed = _FIXED.get(rule)
    if fixed is not None:
        return fixed
    threshold, name = query.local_threshold_tokens, best.decode.worker_id
    if rule is Rule.NEAR:
        why_local = "which cost least there"
        if threshold is not None:
            why_local = f"at most {count(threshold, 'token')} are prefilled there"
        return f"local: {name} lacks {count(best.decode.missing_tokens, 'token')}, {why_local}"
    if rule is Rule.APART:
        return f"local: no prefill worker can hand over to {name} ({barriers.why_alone(name)})"
    if rule is Rule.SPARE:
        late = "" if other is None else f", after {ms(other.ttft_ms)} elsewhere"
        return f"local: {name} gives the first token in time{late}"
    if near is not None and best.prefill is not None:
        lacks = count(near.decode.missing_tokens, "token")
        return (
            f"remote: {near.decode.worker_id} lacks {lacks} and would cost "
            f"{ms(near.cost_ms)}; {best.prefill.worker_id} and {name} cost "
            f"{ms(best.cost_ms)}"
        )
    if threshold is None:
        return "remote: no decode worker holds a part of the prompt"
    return f"remote: no decode worker holds all but {count(threshold, 'token')} of the prompt"


_FIXED = {
    Rule.NO_PREFILL: "local: no prefill worker is ready",
    Rule.PREFILL_UNFIT: "local: no prefill worker may take it",
}
