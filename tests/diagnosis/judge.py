"""What a case of the diagnosis should show, and the verdict on what it showed. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

FACT_S, JUDGEMENT_S = 10.0, 60.0
HOSTS = "hosts"
"""The rule that finds starved machines, as the one that runs this may be."""
MISSED = "missed"
"""The rule that says only that targets are missed: a judgement may begin so, until it is sure of
the cause."""
PATIENCE = 3.0
"""A busy machine may take so many times as long; what came late is noted."""
_REMOVES = re.compile(r"\b(drain|restart|stop|remove)\b", re.IGNORECASE)


class Kind(StrEnum):
    """What a case is: a fact that is to be found within 10 s, a judgement of speed within 60 s, or
    a healthy load."""

    FACT = "facts"
    JUDGEMENT = "judgements"
    HEALTHY = "healthy loads"


class Verdict(StrEnum):
    """How the console did: the right cause came first; it came after another finding; its alert
    never fired; it never came; there was a finding or an alert where none was right; or advice
    would have harmed a healthy worker, or changed nothing. STARVED: the machine really gave the
    fleet too little CPU, and the console said that instead."""

    RIGHT = "right"
    NOT_FIRST = "not first"
    NO_ALERT = "no alert"
    SILENT = "silent"
    FALSE = "false"
    DANGEROUS = "dangerous"
    STARVED = "machine starved"


@dataclass(frozen=True)
class Expected:
    """The right diagnosis: patterns for the headline and for the title of the first finding, its
    rule, the alert, and the seconds that the console may take. `tolerated` are further rules that
    may find what the fault causes, `at_fault` the workers that advice may touch. Without a rule,
    nothing may be found."""

    headline: str = ""
    rule: str | None = None
    title: str = ""
    alert: str | None = None
    within_s: float = FACT_S
    tolerated: Collection[str] = ()
    at_fault: Collection[str] = ()

    @property
    def kind(self) -> Kind:
        """The kind of the case."""
        if self.rule is None:
            return Kind.HEALTHY
        return Kind.JUDGEMENT if self.within_s >= JUDGEMENT_S else Kind.FACT


@dataclass(frozen=True)
class Moment:
    """What the console said after the fault. `at_s` counts the seconds in which the fleet had the
    cores that it could use: waiting for a core stops this clock, so that a busy machine makes
    nothing late. `wall_s` counts all of them, as an alert does."""

    at_s: float
    headline: str
    findings: Sequence[Mapping[str, Any]]
    alerts: Collection[str]
    healthy: Collection[str] = ()
    wall_s: float = 0.0


@dataclass
class Outcome:
    """The verdict on one case, and when each part was right for the first time (None: never)."""

    name: str
    verdict: Verdict
    kind: Kind = Kind.FACT
    expected_alert: str | None = None
    headline_s: float | None = None
    finding_s: float | None = None
    alert_s: float | None = None
    is_late: bool = False
    pressed: float = 0.0
    cpu_s: float = 0.0
    took_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    def row(self) -> str:
        """One line of the table."""

        def seconds(at_s: float | None) -> str:
            return "-" if at_s is None else f"{at_s:.0f} s"

        late = " (late)" if self.is_late else ""
        return (
            f"{self.name:<28} {self.verdict + late:<16} headline {seconds(self.headline_s):>5}  "
            f"finding {seconds(self.finding_s):>5}  alert {seconds(self.alert_s):>5}  "
            f"machine {self.pressed:.0%}  cpu {self.cpu_s:.0f} s  {'; '.join(self.notes)}"
        )

    def as_json(self) -> dict[str, Any]:
        """The outcome for the summary."""
        return asdict(self)


def judge(name: str, expected: Expected, moments: Sequence[Moment]) -> Outcome:
    """The verdict on what the console said in these moments."""
    outcome = Outcome(name, Verdict.RIGHT, expected.kind, expected.alert)
    is_starved = expected.rule != HOSTS and _finds(moments, HOSTS)
    dangerous = {text for each in moments for text in _dangerous(each, expected)}
    if expected.rule is None:
        found = sorted({e["rule"] for each in moments for e in each.findings})
        found += sorted({alert for each in moments for alert in each.alerts})
        outcome.verdict = Verdict.FALSE if found else Verdict.RIGHT
        outcome.notes += found
    else:
        outcome.headline_s = _first(moments, lambda e: _matches(expected.headline, e.headline))
        outcome.finding_s = _first(moments, lambda e: _is_first(expected, e))
        outcome.verdict = _of_fault(expected, moments, outcome)
    if expected.alert is not None:
        fired = (each.wall_s for each in moments if expected.alert in each.alerts)
        outcome.alert_s = next(fired, None)
        if outcome.alert_s is None and outcome.verdict is Verdict.RIGHT:
            outcome.verdict = Verdict.NO_ALERT
            outcome.notes.append(f"{expected.alert} did not fire")
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
    if expected.kind is Kind.JUDGEMENT:
        known.add(MISSED)
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


def _first(moments: Iterable[Moment], holds: Callable[[Moment], bool]) -> float | None:
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


def score(outcomes: Sequence[Outcome]) -> str:
    """The score of a run, by kind. Times are medians, and the slowest."""
    names = ["cases", *Verdict, "late", "finding", "alert"]
    rows = [["", *names]]
    for kind in Kind:
        cases = [each for each in outcomes if each.kind is kind]
        numbers = [len(cases), *(sum(e.verdict is each for e in cases) for each in Verdict)]
        numbers.append(sum(each.is_late for each in cases))
        times = [_times(each.finding_s for each in cases), _times(each.alert_s for each in cases)]
        rows.append([kind, *map(str, numbers), *times])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    harmful = sum(each.verdict is Verdict.DANGEROUS for each in outcomes)
    return "\n".join([*lines, f"wrong or dangerous advice, which must be 0: {harmful}"])


def _times(seconds: Iterable[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    return f"{median(known):.0f} s, {max(known):.0f} s" if known else "-"
