"""The states that an operator must not misread: headline and findings from facts alone."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from console.doctor.client_goodput import clients_of
from console.doctor.doctor import examine
from console.doctor.facts import Facts, KeyFacts
from console.doctor.finding import Evidence, Finding, Urgency
from console.doctor.headline import Headline, Sides, Tone, headline
from console.doctor.observation import Observation
from tests.unit.console.doctor.staged_facts import FLEET, HEALTHY, TROUBLE, seen, worker

ROOM = Sides("Both pools have room")
REMOVING = ("drain", "stop ", "remove")


def said_of(staged: Observation, sides: Sides) -> Headline:
    """The headline over all that is found."""
    return headline(examine(staged).findings, staged.facts, staged.targets.goodput, sides)


@pytest.mark.parametrize("name", TROUBLE)
def test_trouble_is_the_headline_and_the_first_finding(name: str) -> None:
    staged, text, rule = TROUBLE[name]
    said = said_of(staged, ROOM)
    assert said.text == text
    assert said.tone in (Tone.BAD, Tone.WARN)
    assert said.cause
    first, *others = examine(staged).findings
    assert (first.rule, first.title) == (rule, text)
    assert others == [], "what follows from a cause is no finding of its own"


@pytest.mark.parametrize("name", TROUBLE)
def test_no_advice_changes_nothing_or_touches_a_healthy_worker(name: str) -> None:
    staged, _, _ = TROUBLE[name]
    healthy = {each.worker_id for each in staged.facts.workers if each.is_usable}
    for finding in examine(staged).findings:
        assert finding.changes
        for change in finding.changes:
            assert change.old != change.new or change.new is None
            is_removing = any(change.setting.startswith(each) for each in REMOVING)
            assert not (is_removing and healthy & set(change.scope.split()))


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_fleet_has_no_finding(name: str) -> None:
    assert examine(HEALTHY[name]).findings == ()
    assert said_of(HEALTHY[name], ROOM).tone in (Tone.OK, Tone.IDLE)


@pytest.mark.parametrize("name", TROUBLE)
def test_a_check_passes_only_beside_findings_that_it_does_not_contradict(name: str) -> None:
    staged, _, rule = TROUBLE[name]
    passed = {each.rule for each in examine(staged).passed}
    assert rule not in passed
    if rule != "flood" and clients_of(staged.facts).suffer(staged.targets.goodput):
        assert not passed & {"prefill_slow", "decode_slow", "targets"}


@pytest.mark.parametrize(
    ("good", "refused", "late"),
    [case for case in itertools.product((0, 50, 94), (0, 6), (0, 6)) if sum(case) < 100],
)
def test_nothing_has_room_while_a_target_is_missed(good: int, refused: int, late: int) -> None:
    key = KeyFacts(accepted=94, ended=94, good=good, refused=refused, waiting=late, late=late)
    said = said_of(seen(keys=(key,)), ROOM)
    assert (said.text == ROOM.text) is (good / (94 + refused + late) >= 0.95)


@pytest.mark.parametrize(
    ("sides", "text", "tone"),
    [
        (Sides("Prefill is short", "why", is_short=True), "Prefill is short", Tone.BAD),
        (Sides("Decode is tight", "why", is_tight=True), "Decode is tight", Tone.WARN),
        (Sides("?", is_known=False), "100\u00a0% of requests meet their targets", Tone.OK),
    ],
)
def test_pressures_speak_where_no_fact_does(sides: Sides, text: str, tone: Tone) -> None:
    said = said_of(seen(), sides)
    assert (said.text, said.tone) == (text, tone)


def test_a_fleet_without_workers_or_requests_says_so() -> None:
    unknown = Sides("?", is_known=False)
    empty = msgspec.structs.replace(seen(), facts=Facts())
    assert said_of(empty, unknown).text == "No worker has joined"
    starting = seen(worker("decode-1", condition="starting"), keys=())
    said = said_of(starting, unknown)
    assert (said.text, said.cause) == ("No decode worker is ready", "decode-1 is starting.")
    assert said_of(seen(keys=()), unknown).text == "No request in the last minute"


@pytest.mark.parametrize(
    ("urgency", "text"), [(Urgency.SOON, "No decode worker is ready"), (Urgency.URGENT, "found")]
)
def test_only_what_is_urgent_comes_before_workers_that_start(urgency: Urgency, text: str) -> None:
    finding = Finding(
        rule="any", title="found", text=("so",), evidence=Evidence(kind="any"), changes=(),
        urgency=urgency,
    )  # fmt: skip
    facts = Facts(workers=(worker("decode-1", condition="starting"),))
    assert headline([finding], facts, 0.9, ROOM).text == text


def test_the_reason_of_each_missing_worker_is_told_with_its_time() -> None:
    staged, _, _ = TROUBLE["a worker with another model"]
    (finding,) = examine(staged).findings
    assert finding.text == (
        "decode-3 is refused since 14:13:11 UTC: it serves 'b', and this fleet 'a'.",
    )
    (change,) = finding.changes
    assert (change.setting, change.scope) == ("model", "decode-3")


def test_a_flood_pages_nobody() -> None:
    staged, _, _ = TROUBLE["a flooding key"]
    (finding,) = examine(staged).findings
    assert finding.urgency is Urgency.SOON
    assert "100\u00a0% of their requests meet" in " ".join(finding.text)


def test_a_missing_worker_explains_what_else_is_late() -> None:
    staged, _, _ = TROUBLE["one of two decode workers stopped"]
    crowded = worker("decode-1", max_batch_size=2, num_running=2, num_waiting=9)
    facts = msgspec.structs.replace(
        staged.facts,
        workers=(FLEET[0], crowded, staged.facts.workers[2]),
        keys=(KeyFacts(accepted=9, ended=9, good=2, waiting=9, late=9),),
    )
    found = [each.rule for each in examine(Observation(now_us=staged.now_us, facts=facts)).findings]
    assert found == ["workers"]
