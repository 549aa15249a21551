"""What a case of the diagnosis should show, and the verdict on what it showed. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

FACT_S, JUDGEMENT_S = 10.0, 60.0
HOSTS = "hosts"
"""The rule that finds starved machines, as the one that runs this may be."""
PATIENCE = 3.0
"""A busy machine may take so many times as long; what came late is noted."""
_REMOVES = re.compile(r"\b(drain|restart|stop|remove)\b", re.IGNORECASE)


class Verdict(StrEnum):
    """How the console did: the right cause came first; it came after another finding; it never
    came; there was a finding where none was right; or advice would have harmed a healthy worker.
    STARVED: the machine really gave the fleet too little CPU, and the console said that instead."""

    RIGHT = "right"
    NOT_FIRST = "not first"
    SILENT = "silent"
    FALSE = "false"
    DANGEROUS = "dangerous"
    STARVED = "machine starved"


@dataclass(frozen=True)
class Expected:
    """What is right: the headline and the title of the first finding (patterns), its rule, the
    alert, and the seconds that the console may take. `tolerated` are further rules that may find
    what the fault causes, `at_fault` the workers that advice may touch. Without a rule, nothing may
    be found."""

    headline: str = ""
    rule: str | None = None
    title: str = ""
    alert: str | None = None
    within_s: float = FACT_S
    tolerated: Collection[str] = ()
    at_fault: Collection[str] = ()


@dataclass(frozen=True)
class Moment:
    """What the console said so many seconds after the fault."""

    at_s: float
    headline: str
    findings: Sequence[Mapping[str, Any]]
    alerts: Collection[str]
    healthy: Collection[str] = ()


@dataclass
class Outcome:
    """The verdict on one case, and when each part was right for the first time (None: never)."""

    name: str
    verdict: Verdict
    headline_s: float | None = None
    finding_s: float | None = None
    alert_s: float | None = None
    is_late: bool = False
    pressed: float = 0.0
    notes: list[str] = field(default_factory=list)

    def row(self) -> str:
        """One line of the table."""

        def seconds(at_s: float | None) -> str:
            return "-" if at_s is None else f"{at_s:.0f} s"

        late = " (late)" if self.is_late else ""
        return (
            f"{self.name:<28} {self.verdict + late:<16} headline {seconds(self.headline_s):>5}  "
            f"finding {seconds(self.finding_s):>5}  alert {seconds(self.alert_s):>5}  "
            f"machine {self.pressed:.0%}  {'; '.join(self.notes)}"
        )


def judge(name: str, expected: Expected, moments: Sequence[Moment]) -> Outcome:
    """The verdict on what the console said in these moments."""
    outcome = Outcome(name, Verdict.RIGHT)
    is_starved = expected.rule != HOSTS and _finds(moments, HOSTS)
    dangerous = {text for each in moments for text in _dangerous(each, expected)}
    if expected.rule is None:
        found = sorted({e["rule"] for each in moments for e in each.findings})
        outcome.verdict = Verdict.FALSE if found else Verdict.RIGHT
        outcome.notes += found
    else:
        outcome.headline_s = _first(moments, lambda e: _matches(expected.headline, e.headline))
        outcome.finding_s = _first(moments, lambda e: _is_first(expected, e))
        outcome.verdict = _of_fault(expected, moments, outcome)
    if expected.alert is not None:
        outcome.alert_s = _first(moments, lambda e: expected.alert in e.alerts)
    if is_starved and outcome.verdict is not Verdict.RIGHT:
        outcome.verdict = Verdict.STARVED
    if dangerous:
        outcome.verdict = Verdict.DANGEROUS
        outcome.notes += sorted(dangerous)
    return outcome


def _finds(moments: Iterable[Moment], rule: str) -> bool:
    return any(each["rule"] == rule for moment in moments for each in moment.findings)


def _of_fault(expected: Expected, moments: Sequence[Moment], outcome: Outcome) -> Verdict:
    known = {expected.rule, *expected.tolerated}
    others = sorted({e["rule"] for each in moments for e in each.findings} - known)
    outcome.notes += [f"also {each}" for each in others]
    if outcome.finding_s is None:
        is_there = any(_has(expected, e) for each in moments for e in each.findings)
        return Verdict.NOT_FIRST if is_there else Verdict.SILENT
    shown = [at for at in (outcome.headline_s, outcome.finding_s) if at is not None]
    outcome.is_late = max(shown) > expected.within_s
    if outcome.headline_s is None:
        outcome.notes.append(f"headline {moments[-1].headline!r}")
        return Verdict.NOT_FIRST
    return Verdict.FALSE if others else Verdict.RIGHT


def _first(moments: Iterable[Moment], holds: Any) -> float | None:
    return next((each.at_s for each in moments if holds(each)), None)


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def _has(expected: Expected, finding: Mapping[str, Any]) -> bool:
    return finding["rule"] == expected.rule and _matches(expected.title, finding["title"])


def _is_first(expected: Expected, moment: Moment) -> bool:
    """Whether the right cause is the first finding; tolerated ones may come only after it."""
    return bool(moment.findings) and _has(expected, moment.findings[0])


def _dangerous(moment: Moment, expected: Expected) -> Iterable[str]:
    """Advice that takes away a healthy worker, or that changes nothing."""
    for finding in moment.findings:
        for change in finding["changes"]:
            if change["new"] is not None and change["old"] == change["new"]:
                yield f"{change['setting']} {change['old']} -> {change['new']}"
            named = set(re.findall(r"[\w-]+", change["scope"] or ""))
            harmed = (named & set(moment.healthy)) - set(expected.at_fault)
            if harmed and _REMOVES.search(f"{change['setting']} {change['text']}"):
                yield f"{change['setting']} for {', '.join(sorted(harmed))}"


def score(faults: Sequence[Outcome], healthy: Sequence[Outcome]) -> str:
    """The score of a run."""

    def number(outcomes: Sequence[Outcome], verdict: Verdict) -> int:
        return sum(each.verdict is verdict for each in outcomes)

    every = [*faults, *healthy]
    return "\n".join(
        (
            f"right cause first        {number(faults, Verdict.RIGHT)} of {len(faults)}",
            f"right, but late          {sum(each.is_late for each in faults)}",
            f"right, but not first     {number(faults, Verdict.NOT_FIRST)}",
            f"wrong or dangerous       {number(every, Verdict.DANGEROUS)}",
            f"silent                   {number(faults, Verdict.SILENT)}",
            f"not judged: the machine itself was starved  {number(every, Verdict.STARVED)}",
            f"false                    {number(every, Verdict.FALSE)}",
            f"healthy, nothing found   {number(healthy, Verdict.RIGHT)} of {len(healthy)}",
        )
    )
