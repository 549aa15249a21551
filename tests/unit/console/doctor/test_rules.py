"""Rules of the doctor on single figures."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from console.doctor.doctor import examine
from console.doctor.facts import Facts, KeyFacts, WorkerStanding
from console.doctor.finding import Finding
from console.doctor.observation import (
    MIN_REQUESTS,
    MissPoint,
    Observation,
    PairFacts,
    StepModelFacts,
    Targets,
    WorkerFacts,
)
from console.doctor.rules.caches import check_cache_thrash
from console.doctor.rules.decode import check_decode_slow, check_stalls
from console.doctor.rules.workers import check_faults, check_slow_link, check_slow_worker
from console.doctor.symptoms import slowness
from protocol.messages import Role
from tests.unit.console.doctor.mock_fleet import Plan, observe
from tests.unit.console.doctor.observations import GOOD, SECOND, seen


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
