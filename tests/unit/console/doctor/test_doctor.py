"""When findings begin and end, and what is shown without data."""

from __future__ import annotations

import msgspec
import pytest

from console.doctor.doctor import FACT_VANISHES_S, RULES, VANISH_S, Doctor, examine
from console.doctor.facts import Facts, KeyFacts, StoreFacts, WorkerStanding
from console.doctor.finding import Urgency
from console.doctor.observation import (
    FEW_REQUESTS,
    Observation,
    PairFacts,
    StepModelFacts,
    Targets,
    WorkerFacts,
)
from console.doctor.symptoms import goodput, percentile
from protocol.messages import Role
from router.requests.stages import Stage
from tests.unit.console.doctor.mock_fleet import Plan, observe
from tests.unit.console.doctor.observations import FAILED, GOOD, SECOND, seen

FACTS = {each.name for each in RULES if each.is_fact}


def test_a_finding_keeps_its_begin_until_it_was_not_found_for_a_while() -> None:
    doctor = Doctor()
    assert doctor.examine(seen(0)).findings == ()
    for now in (10, 20):
        (finding,) = doctor.examine(seen(now, failed=50)).findings
        assert (finding.rule, finding.since_us) == ("faults", 10 * SECOND)
    held = doctor.examine(seen(20 + VANISH_S))
    assert [each.since_us for each in held.findings] == [10 * SECOND]
    assert "faults" not in {each.rule for each in held.passed}
    over = doctor.examine(seen(21 + VANISH_S))
    assert over.findings == ()
    assert "faults" in {each.rule for each in over.passed}
    (again,) = doctor.examine(seen(100, failed=50)).findings
    assert again.since_us == 100 * SECOND


def test_facts_are_checked_between_judgements_which_stay() -> None:
    doctor, store = Doctor(), StoreFacts(trouble="timeout")
    (judged,) = doctor.examine(seen(10, failed=50)).findings
    assert judged.rule == "faults"
    both = doctor.check_facts(seen(11, facts=Facts(store=store)))
    assert {each.rule for each in both.findings} == {"faults", "store"}
    later = doctor.check_facts(seen(12 + FACT_VANISHES_S))
    assert [each.rule for each in later.findings] == ["faults"]
    passed = {each.rule for each in later.passed}
    assert {"store", "decode_slow"} <= passed, "facts of now, and judgements of before"


def test_what_is_missed_has_time_to_be_explained() -> None:
    missing = Facts(keys=(KeyFacts(accepted=60, ended=60, good=12),))
    doctor = Doctor()
    assert doctor.examine(Observation(now_us=SECOND, facts=missing)).findings == ()
    before = doctor.check_facts(Observation(now_us=10 * SECOND, facts=missing))
    assert before.findings == ()
    (found,) = doctor.check_facts(Observation(now_us=11 * SECOND, facts=missing)).findings
    assert (found.rule, found.since_us) == ("missed", SECOND)
    assert "judging what is slow needs 100 requests" in found.text[0].replace("\u00a0", " ")
    explained = msgspec.structs.replace(missing, store=StoreFacts(trouble="timeout"))
    (cause,) = doctor.check_facts(Observation(now_us=12 * SECOND, facts=explained)).findings
    assert cause.rule == "store"


def test_a_target_out_of_reach_is_seen_after_few_requests() -> None:
    model = StepModelFacts(fixed_us=9_000, per_token_us=100, per_attended_us=0.0)
    worker = WorkerFacts(worker_id="d", role=Role.DECODE, step_model=model)
    few = Observation(
        now_us=1, requests=(GOOD,) * FEW_REQUESTS, workers=(worker,), targets=Targets(tpot_ms=0.1)
    )
    assert [each.rule for each in examine(few).findings] == ["targets"]


def test_urgent_findings_come_first() -> None:
    doctor = Doctor()
    link = PairFacts(
        prefill="p", decode="d", path="tcp", expected_path="rdma", bytes_moved=1, exposed_p95_ms=9.0
    )
    doctor.examine(seen(0, pairs=(link,)))
    both = doctor.examine(seen(5, failed=50, pairs=(link,))).findings
    assert [(each.rule, each.urgency) for each in both] == [
        ("slow_link", Urgency.URGENT), ("faults", Urgency.URGENT),
    ]  # fmt: skip
    few = doctor.examine(seen(6, failed=1, pairs=(link,))).findings
    assert [(each.rule, each.urgency) for each in few] == [
        ("faults", Urgency.URGENT), ("slow_link", Urgency.SOON),
    ]  # fmt: skip


def test_too_few_requests_give_no_conclusion() -> None:
    few = Observation(now_us=1, requests=(FAILED,) * (FEW_REQUESTS - 1))
    examination = examine(few)
    assert not examination.is_conclusive
    assert examination.findings == ()
    assert {each.rule for each in examination.passed} <= FACTS
    assert examination.as_json(600, 1)["is_conclusive"] is False


def test_a_finding_as_json_has_what_the_dashboard_reads() -> None:
    body = examine(seen(0, failed=50)).as_json(600.0, 7)
    assert (body["window_s"], body["checked_us"]) == (600.0, 7)
    (finding,) = body["findings"]
    assert {"rule", "urgency", "since_us", "title", "text", "evidence", "changes"} <= set(finding)
    assert {"rule", "title", "text"} == set(body["passed"][0])


def test_an_observation_survives_its_recording() -> None:
    whole = seen(3, failed=1, workers=(WorkerFacts(worker_id="d", role=Role.DECODE),))
    again = msgspec.json.decode(msgspec.json.encode(whole), type=Observation)
    assert again == whole


def test_goodput_counts_failures_and_both_targets() -> None:
    late = msgspec.structs.replace(GOOD, ttft_ms=11.0)
    slow = msgspec.structs.replace(GOOD, tpot_ms=6.0)
    one_token = msgspec.structs.replace(GOOD, tpot_ms=None)
    requests = (GOOD, late, slow, one_token, FAILED)
    observation = Observation(now_us=1, requests=requests, targets=Targets(ttft_ms=10, tpot_ms=5))
    assert goodput(observation) == 2 / 5
    assert goodput(Observation(now_us=1)) is None


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.75, 3), (0.76, 4), (1, 4), (0, 1)])
def test_percentiles_are_values_that_were_measured(share: float, expected: float) -> None:
    assert percentile([4, 1, 3, 2], share) == expected
    assert percentile([], share) is None


def test_a_finding_says_which_stages_of_requests_it_explains() -> None:
    stages = {each.value for each in Stage}
    explained = {rule.name: set(rule.stages) for rule in RULES}
    assert all(names <= stages for names in explained.values())
    silent = {name for name, names in explained.items() if not names}
    assert silent == {
        "targets", "pools", "workers", "store", "routers", "logs", "tiers", "flood", "invalid",
    }  # fmt: skip
    (finding,) = examine(observe(Plan(slow={"decode-1": 1.6}))).findings
    assert finding.as_json()["stages"] == ("prefill", "decode")


def test_a_fact_ends_when_it_is_over() -> None:
    doctor, store = Doctor(), StoreFacts(trouble="it is away", since_us=1)
    (found,) = doctor.examine(seen(10, facts=Facts(store=store))).findings
    assert found.rule == "store"
    assert doctor.examine(seen(10 + FACT_VANISHES_S + 1)).findings == ()


def test_a_judgement_ends_when_its_cause_is_found() -> None:
    doctor = Doctor()
    doctor.examine(seen(0, failed=50))
    lost = WorkerStanding(worker_id="d", role=Role.DECODE, condition="lost", cause="lost")
    gone = Facts(workers=(lost,), keys=(KeyFacts(refused=9),))
    found = doctor.examine(seen(5, failed=50, facts=gone)).findings
    assert [each.rule for each in found] == ["pools"]
