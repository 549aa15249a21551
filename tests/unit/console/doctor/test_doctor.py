"""When findings begin and end, what is shown without data, and rules on single figures."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from console.doctor.doctor import FACT_VANISHES_S, RULES, VANISH_S, Doctor, examine
from console.doctor.facts import Facts, KeyFacts, StoreFacts, WorkerStanding
from console.doctor.finding import Finding, Urgency
from console.doctor.observation import (
    FEW_REQUESTS,
    MIN_REQUESTS,
    MissPoint,
    Observation,
    PairFacts,
    RequestFacts,
    StepModelFacts,
    Targets,
    WorkerFacts,
)
from console.doctor.rules.caches import check_cache_thrash
from console.doctor.rules.decode import check_decode_slow, check_stalls
from console.doctor.rules.workers import check_faults, check_slow_link, check_slow_worker
from console.doctor.symptoms import goodput, percentile, slowness
from protocol.messages import Role
from router.requests.stages import Stage
from tests.unit.console.doctor.mock_fleet import Plan, observe

GOOD = RequestFacts(received_us=1, num_prompt_tokens=10, ttft_ms=10.0, tpot_ms=5.0)
FAILED = msgspec.structs.replace(GOOD, outcome="failed")
SECOND = 1_000_000
FACTS = {each.name for each in RULES if each.is_fact}


def seen(now_s: float, failed: int = 0, **changes: object) -> Observation:
    requests = (FAILED,) * failed + (GOOD,) * (MIN_REQUESTS - failed)
    whole = Observation(now_us=int(now_s * SECOND), requests=requests)
    return msgspec.structs.replace(whole, **changes)


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


def test_a_larger_cache_is_recommended_where_the_curve_says_so() -> None:
    worker = WorkerFacts(worker_id="d", role=Role.DECODE, evictions_per_s=5.0, hit_rate=0.3)
    curve = tuple(MissPoint(blocks=n, miss_ratio=m) for n, m in ((100, 0.7), (200, 0.4)))
    found = check_cache_thrash(seen(0, workers=(worker,), cache_blocks=100, miss_curve=curve))
    assert isinstance(found, Finding)
    assert found.evidence.numbers[1].value == "+30\u00a0%"
    flat = tuple(MissPoint(blocks=n, miss_ratio=0.7) for n in (100, 200))
    kept = check_cache_thrash(seen(0, workers=(worker,), cache_blocks=100, miss_curve=flat))
    assert isinstance(kept, str)


@pytest.mark.parametrize(
    ("expected", "advice"),
    [("CUDA IPC", "share the PID and IPC namespaces"), ("RDMA", "Let UCX use RDMA in")],
)
def test_what_a_way_needs_is_advised(expected: str, advice: str) -> None:
    pair = PairFacts(prefill="p", decode="d", path="TCP", expected_path=expected, bytes_moved=1)
    found = check_slow_link(seen(0, pairs=(pair,)))
    assert isinstance(found, Finding)
    assert advice in found.changes[0].text
    assert found.changes[0].text.endswith("restart them one after the other.")


def test_a_way_that_gives_too_little_is_found_where_its_name_is_right() -> None:
    pair = PairFacts(
        prefill="p", decode="d", path="CUDA IPC", expected_path="CUDA IPC", bytes_moved=1 << 30,
        busy_bytes_per_s=0.3e9, is_below_way=True,
    )  # fmt: skip
    found = check_slow_link(seen(0, pairs=(pair,)))
    assert isinstance(found, Finding)
    assert "0.30" in found.title
    assert "slower than CUDA IPC gives" in found.title
    assert "share the PID and IPC namespaces" in found.changes[0].text


@pytest.mark.parametrize("path", [None, "unknown"])
def test_a_path_that_cannot_be_told_is_no_finding(path: str | None) -> None:
    pair = PairFacts(prefill="p", decode="d", path=path, expected_path="rdma", bytes_moved=1)
    assert isinstance(check_slow_link(seen(0, pairs=(pair,))), str)


def test_a_worker_that_keeps_ending_is_named() -> None:
    workers = (
        WorkerFacts(worker_id="a", role=Role.DECODE, losses=2),
        WorkerFacts(worker_id="b", role=Role.DECODE, losses=1),
    )
    found = check_faults(seen(0, workers=workers))
    assert isinstance(found, Finding)
    assert found.title == "a keeps ending"
    assert isinstance(check_faults(seen(0, workers=workers[1:])), str)


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


@pytest.mark.parametrize(
    ("waiting", "short", "is_advised"),
    [(0, (), True), (30, (), False), (0, (Role.DECODE,), False)],
)
def test_a_slow_worker_is_drained_only_into_room(
    waiting: int, short: tuple[Role, ...], is_advised: bool
) -> None:
    staged = observe(Plan(slow={"decode-1": 1.6}))
    others = tuple(
        WorkerStanding(worker_id=f"decode-{i}", role=Role.DECODE, max_batch_size=4, num_running=4,
                       num_waiting=waiting)
        for i in (1, 2, 3)
    )  # fmt: skip
    staged = msgspec.structs.replace(staged, facts=Facts(workers=others), short=short)
    found = check_slow_worker(staged)
    assert isinstance(found, Finding)
    drains = [each.setting for each in found.changes if each.setting.startswith("drain")]
    assert drains == ["drain decode-1"] * is_advised


def decoding(
    worker_id: str, late_steps: int = 5000, late_ms: float | None = 2.0, num_steps: int = 9000
) -> WorkerFacts:
    model = None
    if late_ms is not None:
        model = StepModelFacts(fixed_us=late_ms * 1000, per_token_us=0.0, per_attended_us=0.0)
    return WorkerFacts(
        worker_id=worker_id, role=Role.DECODE, num_steps=num_steps, step_ms=2.0, step_tokens=4.0,
        step_attended=100.0, late_steps=late_steps, late_model=model,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("worker", "ratio"),
    [
        (decoding("decode-1", late_steps=0, late_ms=12.0), 6.0),
        (decoding("decode-1", late_steps=500, late_ms=12.0, num_steps=40), 6.0),
        (decoding("decode-1", late_steps=501, late_ms=12.0), None),  # it gets requests
        (decoding("decode-1", late_steps=0, late_ms=3.9), None),
        (decoding("decode-1", late_steps=0, late_ms=None), None),  # it has just joined
    ],
)
def test_a_slow_worker_is_named_though_routers_avoid_it(
    worker: WorkerFacts, ratio: float | None
) -> None:
    others = decoding("decode-2"), decoding("decode-3", late_ms=None)
    found = check_slow_worker(seen(0, workers=(worker, *others)))
    assert isinstance(found, Finding) == (ratio is not None)
    if isinstance(found, Finding):
        assert found.title == "decode-1 is slower than the decode pool"
        assert "routers place requests on those" in found.text[0]
        assert [(each.name, each.value) for each in found.evidence.bars] == [
            ("decode-1", ratio), ("decode-2", 1.0), ("decode-3", 1.0),
        ]  # fmt: skip


def test_an_idle_pool_avoids_no_worker() -> None:
    idle = [decoding(f"decode-{i}", late_steps=0, late_ms=2.0 * 6**i) for i in (1, 2, 3)]
    assert not isinstance(check_slow_worker(seen(0, workers=tuple(idle))), Finding)


@pytest.mark.parametrize(
    ("busy", "size", "title"),
    [
        ((10, 14, 9, 9), 2, "Rank 1 of decode-1 is slower than the worker's other ranks"),
        ((10, 11, 29, 20), 2, "Rank 2 of decode-1 is slower than the worker's other ranks"),
        ((10, 11, 29, 29), 2, None),  # of another stage
        ((10, 29), 1, None),
        ((), 2, None),
    ],
)
def test_a_slow_rank_is_named_by_a_worker_without_others(
    busy: tuple[int, ...], size: int, title: str | None
) -> None:
    worker = WorkerFacts(
        worker_id="decode-1",
        role=Role.DECODE,
        num_steps=1000,
        tensor_parallel=size,
        rank_busy_us=tuple(each * SECOND for each in busy),
    )
    found = check_slow_worker(seen(0, workers=(worker,)))
    assert (found.title if isinstance(found, Finding) else None) == title


def test_a_worker_with_which_attempts_fail_is_named() -> None:
    """Requests end well elsewhere: only their repetition shows it."""
    good = msgspec.structs.replace(GOOD, prefill="p1", decode="d1")
    again = msgspec.structs.replace(good, num_attempts=2, failed_attempts=(("p2", "d1"),))
    found = check_faults(seen(0, requests=(good,) * 60 + (again,) * 40))
    assert isinstance(found, Finding)
    assert (found.title, found.changes[0].scope) == ("Attempts with p2 fail", "p2")
    anywhere = msgspec.structs.replace(again, failed_attempts=(("p1", "d1"),))
    found = check_faults(seen(0, requests=(good,) * 60 + (anywhere,) * 40))
    assert isinstance(found, Finding)
    assert found.title == "Requests are repeated or fail"


def test_a_worker_that_forbids_the_best_way_is_named_alone() -> None:
    pair = PairFacts(
        prefill="p", decode="d2", path="TCP", expected_path="CMA", bytes_moved=1, narrowed=("d2",)
    )
    found = check_slow_link(seen(0, pairs=(pair,)))
    assert isinstance(found, Finding)
    assert found.title == "Blocks for d2 go over TCP: UCX_TLS of d2 forbids CMA"
    (change,) = found.changes
    assert (change.setting, change.scope) == ("UCX_TLS", "d2")
    assert "p" not in change.scope


STUTTERING: dict[str, Any] = {
    "num_steps": 10, "num_long_steps": 5, "num_long_shared_steps": 5, "long_step_ms": 90.0,
}  # fmt: skip


def test_stalls_ask_for_no_setting_of_routers() -> None:
    """How many prompts decode workers compute follows from costs."""
    request = msgspec.structs.replace(GOOD, **STUTTERING)
    workers = tuple(
        WorkerFacts(worker_id=each.value, role=each) for each in (Role.PREFILL, Role.DECODE)
    )
    found = check_stalls(Observation(now_us=1, requests=(request,) * MIN_REQUESTS, workers=workers))
    assert isinstance(found, Finding)
    assert [each.setting for each in found.changes if each.scope == "router"] == []


def test_long_steps_that_keep_the_target_of_a_token_are_no_stalls() -> None:
    """Nobody notices them, however many they are."""
    request = msgspec.structs.replace(GOOD, **STUTTERING)
    stuttering = Observation(now_us=1, requests=(request,) * MIN_REQUESTS)
    for tpot_ms, is_found in ((89.0, True), (90.0, False)):
        seen = msgspec.structs.replace(stuttering, targets=Targets(tpot_ms=tpot_ms))
        assert isinstance(check_stalls(seen), Finding) is is_found


def test_only_long_steps_that_somebody_notices_say_what_stalls_are_caused_by() -> None:
    """Steps that keep the target have prompt tokens; those that exceed it have none."""
    kept = msgspec.structs.replace(GOOD, **STUTTERING | {"long_step_ms": 10.0})
    missed = msgspec.structs.replace(GOOD, **STUTTERING | {"num_long_shared_steps": 0})
    seen = Observation(now_us=1, requests=(kept, missed) * MIN_REQUESTS)
    assert check_stalls(seen) is None, "steps stand out, and no prompt is the reason"


def test_prompts_on_decode_workers_are_no_cause_while_prefill_is_short() -> None:
    request = msgspec.structs.replace(GOOD, **STUTTERING)
    stuttering = Observation(now_us=1, requests=(request,) * MIN_REQUESTS)
    assert isinstance(check_stalls(stuttering), Finding)
    assert check_stalls(msgspec.structs.replace(stuttering, short=(Role.PREFILL,))) is None


def test_steps_within_their_target_are_not_what_makes_tokens_late() -> None:
    """Weights of fewer bits would not help where a few long gaps make tokens late."""
    late = msgspec.structs.replace(GOOD, tpot_ms=90.0, rest={"decode": 900.0})
    quick = WorkerFacts(worker_id="d", role=Role.DECODE, step_ms=23.0, num_steps=500)
    whole = Observation(now_us=1, requests=(late,) * MIN_REQUESTS, workers=(quick,))
    assert check_decode_slow(whole) is None
    slow = msgspec.structs.replace(quick, step_ms=80.0)
    found = check_decode_slow(msgspec.structs.replace(whole, workers=(slow,)))
    assert isinstance(found, Finding)
    assert [each.new for each in found.changes] == ["int8"]
    rounded = msgspec.structs.replace(
        whole, workers=(slow,), settings={"weights": "int4", "kv_dtype": "fp8"}
    )
    found = check_decode_slow(rounded)
    assert isinstance(found, Finding)
    assert [each.setting for each in found.changes] == ["devices"]


def test_workers_with_unequal_batches_are_not_compared() -> None:
    usual = WorkerFacts(
        worker_id="d1", role=Role.DECODE, step_ms=40.0, num_steps=500, step_tokens=30.0,
        step_attended=20_000.0,
    )  # fmt: skip
    spared = msgspec.structs.replace(
        usual, worker_id="d2", step_ms=8.0, step_tokens=1.5, step_attended=600.0
    )
    assert slowness(usual, [usual, spared]) is None
    alike = msgspec.structs.replace(usual, worker_id="d3", step_ms=20.0)
    assert slowness(usual, [usual, spared, alike]) == 2.0


def test_a_key_that_floods_is_not_judged_for() -> None:
    late = msgspec.structs.replace(GOOD, key="batch", ttft_ms=60_000.0, first={"queue": 60_000.0})
    good = msgspec.structs.replace(GOOD, key="chat")
    keys = (KeyFacts(name="batch", accepted=100, limited=900), KeyFacts(name="chat"))
    both = (late,) * MIN_REQUESTS + (good,) * MIN_REQUESTS
    whole = Observation(now_us=1, requests=both, facts=Facts(keys=keys))
    assert [each.rule for each in examine(whole).findings] == ["flood"]
    calm = msgspec.structs.replace(whole, facts=Facts())
    assert "flood" not in [each.rule for each in examine(calm).findings]
    assert examine(calm).findings != ()


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
