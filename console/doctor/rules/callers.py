"""Faults at the door: keys that flood, invalid requests, a router that is too slow.

They judge facts, so they need no minimum number of requests.
"""

from __future__ import annotations

from console.doctor.client_goodput import clients_of, floods, is_mostly_invalid
from console.doctor.finding import Bar, Change, Evidence, Finding, Number, Urgency
from console.doctor.observation import Observation
from process.number_text import count, integer, ms, percent

LATE_MS = 20.0
"""Median lag of the event loop from which clients notice it: each token waits as long."""


def check_flood(seen: Observation) -> Finding | str:
    """Whether a key sends far more than it may. Others are safe: each key has its own limit."""
    flooding = [each for each in seen.facts.keys if floods(each)]
    if not flooding:
        limited = sum(each.limited for each in seen.facts.keys)
        return f"{count(limited, 'request')} refused for their key's limit in the last minute"
    names = ", ".join(each.name for each in flooding)
    others = clients_of(seen.facts)
    limited = sum(each.limited for each in flooding)
    return Finding(
        rule="flood",
        title=f"Key {names} sends more than it may",
        text=(
            f"{count(limited, 'request')} of it were refused in the last minute (429). Other "
            f"keys have limits of their own: {percent(others.goodput)} of their requests meet "
            "their targets.",
        ),
        evidence=Evidence(
            kind="requests of the last minute, refused for their key's limit",
            unit="requests",
            bars=tuple(
                Bar(each.name, each.limited, each in flooding)
                for each in sorted(seen.facts.keys, key=lambda each: -each.limited)[:8]
            ),
            numbers=(
                Number(integer(sum(each.accepted for each in flooding)), "of it accepted"),
                Number(percent(others.goodput), "goodput of the others"),
            ),
        ),
        changes=(
            Change(
                setting="inflight", scope=f"key {names}",
                text="Ask its owner to obey Retry-After. Raise the key's limit only if the fleet "
                "has room for it.",
            ),
        ),
    )  # fmt: skip


def check_invalid(seen: Observation) -> Finding | str:
    """Whether most requests of a key are invalid."""
    wrong = [each for each in seen.facts.keys if is_mostly_invalid(each)]
    invalid = sum(each.invalid for each in seen.facts.keys)
    if not wrong:
        return f"{count(invalid, 'request')} answered 400 to 428 in the last minute"
    whose = ", ".join(each.name for each in wrong if each.name)
    number = sum(each.invalid for each in wrong)
    total = number + sum(each.accepted + each.refused for each in wrong)
    return Finding(
        rule="invalid",
        title=f"Most requests of key {whose} are invalid" if whose else "Most requests are invalid",
        text=(
            f"{integer(number)} of {count(total, 'request')} of the last minute were answered with "
            "a status from 400 to 428, so they reached no worker. The fleet itself may be well.",
        ),
        urgency=Urgency.URGENT,
        evidence=Evidence(
            kind="invalid requests of the last minute",
            unit="requests",
            bars=tuple(
                Bar(each.name or "without a key", each.invalid, is_flagged=True)
                for each in sorted(wrong, key=lambda each: -each.invalid)[:8]
            ),
        ),
        changes=(
            Change(
                setting="requests", scope=f"key {whose}" if whose else "clients",
                text="Each answer names the field: often a model's name that is not served "
                "(served_model_name), or a prompt longer than max_context, after either changed.",
            ),
        ),
    )  # fmt: skip


def check_router(seen: Observation) -> Finding | str | None:
    """Whether this router's event loop is so late that clients miss their targets."""
    loop = seen.facts.loop
    if loop is None:
        return None
    if loop.lag_ms < LATE_MS:
        return f"its event loop runs {ms(loop.lag_ms)} late (median)"
    if not clients_of(seen.facts).suffer(seen.targets.goodput):
        return None
    return Finding(
        rule="router",
        title=f"The router is slow: its event loop runs {ms(loop.lag_ms)} late",
        text=(
            "Each step of a request through the router, and each token, waits as long. Workers "
            "have no part in that.",
        ),
        urgency=Urgency.URGENT,
        evidence=Evidence(
            kind="lateness of timers in ten seconds",
            numbers=(Number(ms(loop.lag_ms), "median"), Number(ms(loop.worst_ms), "most")),
        ),
        changes=(
            Change(
                setting="routers", scope="router",
                text="Add routers behind the load balancer, or give this one a core of its own; "
                "its CPU limit may hold it up.",
            ),
        ),
    )  # fmt: skip
