"""Properties of what the console says of any fleet: headline, findings, checks and advice agree."""

from __future__ import annotations

import re
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from console.doctor.client_goodput import clients_of, floods
from console.doctor.doctor import Doctor, Examination, examine
from console.doctor.finding import Finding, Urgency
from console.doctor.headline import Sides, Tone, headline
from console.doctor.observation import Observation
from console.telemetry.pressure import Side, SideState, Verdict
from protocol.messages import Role
from tests.effort import times
from tests.unit.console.doctor.random_fleets import Staged, fleets
from tests.unit.console.doctor.staged_facts import NOW_US

CALM = (Tone.OK, Tone.IDLE)


def sides_of(staged: Observation) -> Sides:
    """The sides as the fleet's report tells them."""

    def side(role: Role, pressure: float | None) -> Side:
        if pressure is None:
            return Side(None)
        tight = SideState.TIGHT if pressure > 0.9 else SideState.ROOM
        return Side(SideState.SHORT if role in staged.short else tight)

    verdict = Verdict(
        side(Role.PREFILL, staged.pressure_prefill), side(Role.DECODE, staged.pressure_decode)
    )
    states = (verdict.prefill.state, verdict.decode.state)
    return Sides(
        verdict.sentence,
        "Why.",
        SideState.SHORT in states,
        SideState.TIGHT in states,
        any(each is not None for each in states),
    )


def assert_agreement(staged: Observation, examination: Examination) -> None:
    """Nothing that the console says contradicts anything else that it says or knows."""
    findings = examination.findings
    goodput = staged.targets.goodput
    said = headline(findings, staged.facts, goodput, sides_of(staged))
    has_decode = bool(staged.facts.usable(Role.DECODE))
    if findings:
        assert said.tone not in CALM
        assert said.text == findings[0].title or not has_decode
        assert (said.tone is Tone.BAD) or findings[0].urgency is not Urgency.URGENT
    if staged.short and has_decode:
        assert said.tone is Tone.BAD
    if clients_of(staged.facts).are_missed(goodput):
        assert said.tone not in CALM
    if said.tone in CALM:
        assert not findings
        assert not staged.short
    assert ("room" not in said.text) or said.tone is Tone.OK
    assert_findings_agree(staged, findings)
    passed = {each.rule for each in examination.passed}
    assert not passed & {each.rule for each in findings}
    assert not (staged.short and "pool_balance" in passed)
    assert not (any(map(floods, staged.facts.keys)) and "flood" in passed)


EXCLUSIVE = (
    {"pool_balance", "memory_full"},  # places are what lacks, or memory
    {"pool_balance", "prefill_slow"},  # prompts wait, or take long
    {"decode_slow", "memory_full", "long_output", "slow_worker", "stalls"},
    {"pools", "workers"},
    {"pools", "router"},
    {"hosts", "router"},
    {"router", "pool_balance"},
    {"pools", "hosts"},
    {"pools", "pool_balance"},
    {"hosts", "pool_balance"},
    {"hosts", "slow_worker"},
    {"workers", "pool_balance"},
    {"few_blocks", "pool_balance"},
    {"cold_cache", "cache_thrash"},
)
"""Rules of which only one can be right at a time: a set of causes for one and the same effect."""


def assert_findings_agree(staged: Observation, findings: tuple[Finding, ...]) -> None:
    """No two findings contradict each other, and no advice undoes another's."""
    rules = [each.rule for each in findings]
    assert len(set(rules)) == len(rules)
    for group in EXCLUSIVE:
        if "decode_slow" in group:
            assert "decode_slow" not in rules or group & set(rules) == {"decode_slow"}
        else:
            assert len(group & set(rules)) <= 1, group
    assert rules == ["missed"] or "missed" not in rules
    changes = [change for each in findings for change in each.changes]
    values = Counter((e.setting, e.scope) for e in changes if e.new is not None)
    assert not values or max(values.values()) == 1, "one value for each setting"
    grown = {e.scope for e in changes if e.setting.endswith(" workers") and e.new}
    for change in changes:
        assert change.new is None or change.old != change.new
        assert "–" not in f"{change.setting}{change.old}{change.new}"
        moved = re.search(r"Move one from the (\w+) pool", change.text)
        assert moved is None or f"{moved[1]} pool" not in grown, "a pool gives and gets a worker"
        if change.setting.startswith("drain "):
            assert_may_drain(staged, change.scope)


def assert_may_drain(staged: Observation, worker_id: str) -> None:
    """Only a worker whose pool has others, with room for what it carries, may be drained."""
    role = Role(worker_id.partition("-")[0])
    others = [each for each in staged.facts.usable(role) if each.worker_id != worker_id]
    assert others
    assert role not in staged.short
    assert not any(each.is_crowded for each in others)


@settings(max_examples=times(25, 5_000), deadline=None)
@given(fleets())
def test_all_that_is_said_of_a_fleet_agrees(staged: Staged) -> None:
    assert_agreement(staged.seen, examine(staged.seen))


@settings(max_examples=times(10, 2_000), deadline=None)
@given(st.lists(st.tuples(fleets(), st.sampled_from((1, 3, 12, 40)), st.booleans()), max_size=6))
def test_it_agrees_over_time_too(course: list[tuple[Staged, int, bool]]) -> None:
    doctor, now_us = Doctor(), NOW_US
    for staged, seconds, is_judged in course:
        now_us += seconds * 1_000_000
        observation = msgspec.structs.replace(staged.seen, now_us=now_us)
        take = doctor.examine if is_judged else doctor.check_facts
        assert_agreement(observation, take(observation))
