"""The one sentence at the top of the page. What clients get, and why, comes before the load of the
pools.

It is the first of the doctor's findings, so that the two agree. Without findings it never says that
pools have room while a target is missed. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from console.doctor.client_goodput import Clients, clients_of
from console.doctor.facts import Facts
from console.doctor.finding import Finding, Urgency
from process.number_text import count, integer, percent
from protocol.messages import Role


class Tone(StrEnum):
    """How bad the state is."""

    BAD = "bad"
    WARN = "warn"
    OK = "ok"
    IDLE = "idle"


@dataclass(frozen=True)
class Headline:
    """A sentence, its explanation, and the name of the rule that found it, if a rule did."""

    text: str
    cause: str | None
    tone: Tone
    rule: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The headline's part of the body of `GET /doctor`."""
        return {"text": self.text, "cause": self.cause, "tone": self.tone.value}


@dataclass(frozen=True)
class Sides:
    """The pressures in words: a sentence, its explanation, and whether a side is short or tight.
    `is_known` is False while no request gives a pressure."""

    text: str
    cause: str | None = None
    is_short: bool = False
    is_tight: bool = False
    is_known: bool = True


def headline(findings: Sequence[Finding], facts: Facts, goodput: float, sides: Sides) -> Headline:
    """The headline over the findings that stand, in their order. `goodput` is its target."""
    clients = clients_of(facts)
    is_urgent = bool(findings) and findings[0].urgency is Urgency.URGENT
    waits = _not_ready(facts)
    if waits is not None and not is_urgent:
        return waits
    if findings:
        return _of(findings[0], sides)
    if sides.is_short:
        return Headline(sides.text, sides.cause, Tone.BAD)
    if clients.are_missed(goodput):
        return _missed(clients, goodput)
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


def _of(finding: Finding, sides: Sides) -> Headline:
    """A finding as the headline, followed by a short side that the finding does not mention."""
    is_bad = finding.urgency is Urgency.URGENT or sides.is_short
    is_told = finding.urgency is Urgency.URGENT or finding.title == sides.text
    rest = (f"{sides.text}.", sides.cause or "") if sides.is_short and not is_told else ()
    cause = " ".join(filter(None, (*finding.text, *rest)))
    return Headline(finding.title, cause, Tone.BAD if is_bad else Tone.WARN, finding.rule)


def _not_ready(facts: Facts) -> Headline | None:
    """The headline if no decode worker is usable although none is missing: the first ones are
    starting, or the last ones are leaving. None otherwise."""
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
        Tone.BAD if clients.suffer(target) else Tone.WARN,
    )
