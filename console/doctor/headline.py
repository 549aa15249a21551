"""The one sentence at the top of the page: what clients get, and why, before what pools could take.

It follows from the same facts and rules as the doctor's findings, so that the two agree. It never
says that pools have room while a target is missed. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from console.doctor.clients import Clients, clients_of
from console.doctor.doctor import examine
from console.doctor.facts import Facts
from console.doctor.finding import Finding, Urgency
from console.doctor.observation import Observation
from process.figures import count, integer, percent
from protocol.messages import Role


class Tone(StrEnum):
    """How bad the news is."""

    BAD = "bad"
    WARN = "warn"
    OK = "ok"
    IDLE = "idle"


@dataclass(frozen=True)
class Headline:
    """A sentence, its explanation, and the rule whose finding it is, if it is one's."""

    text: str
    cause: str | None
    tone: Tone
    rule: str | None = None


@dataclass(frozen=True)
class Sides:
    """What the pressures say: a sentence, its explanation, and whether a side is short or tight.
    `is_known` is False while no request gives a pressure."""

    text: str
    cause: str | None = None
    is_short: bool = False
    is_tight: bool = False
    is_known: bool = True


def headline(seen: Observation, sides: Sides) -> Headline:
    """The headline for an observation without requests: it follows from facts alone."""
    findings = examine(seen).findings
    clients = clients_of(seen.facts)
    urgent = next((each for each in findings if each.urgency is Urgency.URGENT), None)
    if urgent is not None:
        return _of(urgent, Tone.BAD)
    waits = _not_ready(seen.facts)
    if waits is not None:
        return waits
    if sides.is_short:
        return Headline(sides.text, sides.cause, Tone.BAD, "pool_balance")
    if findings:
        return _of(findings[0], Tone.WARN)
    if clients.are_missed(seen.targets.goodput):
        return _missed(clients, seen.targets.goodput)
    if sides.is_tight:
        return Headline(sides.text, sides.cause, Tone.WARN)
    if not sides.is_known and not clients.total:
        return Headline(
            "No request in the last minute",
            "Pressure is measured from the prompts of the last minute, and there were none.",
            Tone.IDLE,
        )
    if not sides.is_known:
        return Headline(f"{percent(clients.goodput)} of requests meet their targets",
                        "No prompt of the last minute gives a pressure.", Tone.OK)  # fmt: skip
    return Headline(sides.text, sides.cause or "Neither pool is near its target.", Tone.OK)


def _of(finding: Finding, tone: Tone) -> Headline:
    return Headline(finding.title, " ".join(finding.text), tone, finding.rule)


def _not_ready(facts: Facts) -> Headline | None:
    """While no decode worker is usable, and none is missing: the first ones start, or the last ones
    leave."""
    if facts.usable(Role.DECODE):
        return None
    if not facts.workers:
        return Headline("No worker has joined", "Start workers of both roles.", Tone.IDLE)
    standing = [f"{each.worker_id} is {each.condition}" for each in facts.pool(Role.DECODE)]
    cause = f"{', '.join(standing)}." if standing else "No decode worker has joined."
    return Headline("No decode worker is ready", cause, Tone.WARN)


def _missed(clients: Clients, target: float) -> Headline:
    bad = clients.total - clients.good
    verb = "misses" if bad == 1 else "miss"
    return Headline(
        f"{count(bad, 'request')} of {integer(clients.total)} {verb} a target",
        f"{percent(clients.goodput)} meet both; the target is {percent(target)}.",
        Tone.WARN,
    )
