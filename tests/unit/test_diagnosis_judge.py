"""How the diagnosis of planted faults is judged, and how its rules are sped up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.chart.chart import CHART_FOLDER
from tests.diagnosis.cases import FAULTS, HEALTHY
from tests.diagnosis.judge import Expected, Moment, Verdict, judge, score
from tests.diagnosis.scene import faster

EXPECTED = Expected("d2 is lost", "workers", "d2 is lost", "Lost", tolerated=("faults",))


def finding(rule: str, title: str = "d2 is lost", **change: Any) -> dict[str, Any]:
    usual = {"setting": "logs", "scope": "d2", "old": None, "new": None, "text": "Look."}
    return {"rule": rule, "title": title, "changes": [usual | change]}


STARVED = finding("hosts", "vm is starved of CPU")
LOST, FAULTS_TOO, SLOW = finding("workers"), finding("faults", "?"), finding("decode_slow", "?")


def moment(at_s: float, *findings: dict[str, Any], **fields: Any) -> Moment:
    usual: dict[str, Any] = {"headline": "d2 is lost", "alerts": ("Lost",), "healthy": ("d1",)}
    return Moment(at_s=at_s, findings=findings, **({"wall_s": at_s} | usual | fields))


@pytest.mark.parametrize(
    ("moments", "verdict"),
    [
        ([moment(1), moment(2, LOST)], Verdict.RIGHT),
        ([moment(2, LOST, FAULTS_TOO)], Verdict.RIGHT),
        ([moment(2, FAULTS_TOO, LOST)], Verdict.NOT_FIRST),
        ([moment(2, LOST, headline="Both pools have room")], Verdict.NOT_FIRST),
        ([moment(2, SLOW), moment(3, LOST)], Verdict.FALSE),
        ([moment(2, LOST, alerts=("Other",))], Verdict.NO_ALERT),
        ([moment(2), moment(60)], Verdict.SILENT),
        ([moment(2, STARVED)], Verdict.STARVED),
        ([moment(2, STARVED, LOST), moment(3, LOST)], Verdict.STARVED),
        ([moment(2, LOST, finding("flood", scope="d1", text="Drain it."))], Verdict.DANGEROUS),
        ([moment(2, finding("workers", text="Restart it."))], Verdict.RIGHT),
        ([moment(2, finding("workers", old="64", new="64"))], Verdict.DANGEROUS),
    ],
)
def test_the_verdict_on_a_fault(moments: list[Moment], verdict: Verdict) -> None:
    assert judge("a fault", EXPECTED, moments).verdict is verdict


def test_a_judgement_may_begin_with_targets_that_are_missed() -> None:
    """And so may no fact, which needs no requests."""
    moments = [moment(2, finding("missed", "?")), moment(20, LOST)]
    assert judge("slow", replace(EXPECTED, within_s=60.0), moments).verdict is Verdict.RIGHT
    assert judge("lost", EXPECTED, moments).verdict is Verdict.FALSE


def test_times_are_those_of_the_first_right_look() -> None:
    moments = [
        moment(1, headline="?", alerts=()), moment(9, LOST, alerts=()), moment(31, LOST, wall_s=90),
    ]  # fmt: skip
    outcome = judge("a fault", EXPECTED, moments)
    assert (outcome.headline_s, outcome.finding_s, outcome.alert_s) == (9, 9, 90)
    assert not outcome.is_late
    assert judge("late", EXPECTED, [moment(11, LOST)]).is_late


def test_a_healthy_fleet_has_no_finding_at_all() -> None:
    calm = moment(1, alerts=())
    assert judge("idle", Expected(), [calm]).verdict is Verdict.RIGHT
    assert judge("idle", Expected(), [calm, moment(2, SLOW)]).verdict is Verdict.FALSE
    alarmed = judge("idle", Expected(), [calm, moment(2)])
    assert (alarmed.verdict, alarmed.notes) == (Verdict.FALSE, ["Lost"])


def test_the_score_counts_each_verdict_by_kind() -> None:
    slow = replace(EXPECTED, within_s=60.0)
    outcomes = [
        judge("a", EXPECTED, [moment(2, LOST)]), judge("b", EXPECTED, [moment(2)]),
        judge("c", slow, [moment(45, LOST)]), judge("idle", Expected(), [moment(1, alerts=())]),
    ]  # fmt: skip
    names, facts, judgements, healthy, harm = score(outcomes).splitlines()
    column = {each: names.index(each) for each in ("cases", "right", "silent", "late", "finding")}
    assert [facts[column[each]] for each in ("cases", "right", "silent")] == ["2", "1", "1"]
    assert facts[column["finding"] :].startswith("2 s, 2 s")
    assert [judgements[column[each]] for each in ("cases", "right", "late")] == ["1", "1", "0"]
    assert [healthy[column[each]] for each in ("cases", "right")] == ["1", "1"]
    assert harm.endswith(": 0")


def test_there_are_enough_cases_and_each_has_its_name() -> None:
    names = [each.name for each in (*FAULTS, *HEALTHY)]
    assert len(set(names)) == len(names)
    assert len(FAULTS) >= 25
    assert len(HEALTHY) >= 10


def test_rules_are_sped_up_and_keep_their_expressions() -> None:
    rule = 'expr: rate(a[10m]) > 0.05 and b{le="5m"}\n        for: 5m\n'
    assert faster(rule) == 'expr: rate(a[50s]) > 0.05 and b{le="5m"}\n        for: 25s\n'
    whole = (CHART_FOLDER / "files/rules/baton.yaml").read_text()
    assert len(faster(whole).splitlines()) == len(whole.splitlines())
