"""Targets that are missed for a reason that no rule knows. The fleet must not look healthy then."""

from __future__ import annotations

from console.doctor.client_goodput import clients_of
from console.doctor.finding import Change, Evidence, Finding, Number, Urgency
from console.doctor.observation import MIN_REQUESTS, Observation, RequestFacts
from console.doctor.symptoms import goodput, is_ttft_high, late_requests
from process.number_text import count, integer, percent

MISSED = "missed"


def check_missed(seen: Observation) -> Finding | None:
    """A finding of last resort: goodput is below its target. It names the stage that takes most of
    the time of the requests that miss."""
    clients, target = clients_of(seen.facts), seen.targets.goodput
    share = goodput(seen) if len(seen.requests) >= MIN_REQUESTS else None
    if clients.suffer(target):
        share = clients.goodput
    if share is None or share >= target:
        return None
    stage = _longest_stage(seen)
    return Finding(
        rule=MISSED,
        title=f"{percent(share)} of requests meet their targets",
        text=(
            f"The target is {percent(target)}. {_why_unknown(seen)}",
            *([f"Requests that miss lose most time in the stage `{stage}`."] if stage else []),
        ),
        urgency=Urgency.URGENT,
        evidence=Evidence(
            kind="requests of the last minute",
            numbers=(
                Number(f"{integer(clients.good)} of {integer(clients.total)}", "meet both targets"),
                Number(integer(clients.refused), "refused or failed"),
                Number(integer(clients.late), "wait too long already"),
            ),
        ),
        changes=(
            Change(
                setting="requests", scope="router",
                text="Open a slow request in the Requests view: its stages and its placement say "
                "where it lost its time.",
            ),
        ),
        stages=(stage,) if stage else (),
    )  # fmt: skip


def _why_unknown(seen: Observation) -> str:
    """Why no other finding explains the missed targets."""
    if len(seen.requests) >= MIN_REQUESTS:
        return "No rule names a cause."
    return (
        f"No fact explains it, and judging what is slow needs {count(MIN_REQUESTS, 'request')} "
        f"within ten minutes; {integer(len(seen.requests))} have finished."
    )


def _longest_stage(seen: Observation) -> str | None:
    """The stage that takes most of the time of requests that miss."""
    is_first = is_ttft_high(seen)
    late = late_requests(seen) if is_first else list(seen.requests)
    sums: dict[str, float] = {}
    for each in late:
        for stage, ms in _stages(each, is_first).items():
            sums[stage] = sums.get(stage, 0.0) + ms
    return max(sums, key=lambda each: sums[each], default=None)


def _stages(request: RequestFacts, is_first: bool) -> dict[str, float]:
    return request.first if is_first else request.rest
