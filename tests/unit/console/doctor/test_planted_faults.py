"""The doctor's table: each planted fault is named, and no other; a healthy fleet has none."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from console.doctor.doctor import RULES, examine
from console.doctor.observation import PairFacts, StepModelFacts, Targets
from tests.effort import times
from tests.unit.console.doctor.mock_fleet import Plan, observe

HEALTHY = Plan()
LINKS = tuple(
    PairFacts(
        prefill=f"prefill-{i}", decode=f"decode-{j}", path="rdma", expected_path="rdma",
        bytes_moved=10**9, busy_bytes_per_s=38e9, exposed_p95_ms=2.0,
    )
    for i in range(3)
    for j in range(3)
)  # fmt: skip


def _links(**changes: object) -> tuple[PairFacts, ...]:
    return (msgspec.structs.replace(LINKS[0], **changes), *LINKS[1:])


PLANTED = {
    "healthy": (HEALTHY, None),
    "healthy, with links": (Plan(pairs=LINKS), None),
    "too much load for prefill": (
        Plan(requests_per_s=46, seconds=60, num_decode=12), "pool_balance",
    ),
    "one of three prefill workers": (
        Plan(requests_per_s=16, seconds=60, num_prefill=1), "pool_balance",
    ),
    "too few places in decode batches": (Plan(max_batch_size=2), "pool_balance"),
    "some long prompts": (
        Plan(prompt_tokens=(600,) * 9 + (7000,), requests_per_s=1.5), "prefill_slow",
    ),
    "slow kernels in large batches": (
        Plan(decode_model=StepModelFacts(fixed_us=12_000, per_token_us=5000, per_attended_us=0.02)),
        "decode_slow",
    ),
    "long answers": (
        Plan(output_tokens=(1500,), requests_per_s=0.06, seconds=2400, prompt_tokens=(64,),
             prefix_tokens=32,
             decode_model=StepModelFacts(
                 fixed_us=12_000, per_token_us=100, per_attended_us=25)),
        "long_output",
    ),
    "prompts on decode workers": (
        Plan(local_share=0.8, targets=Targets(ttft_ms=1000, tpot_ms=60)), "stalls",
    ),
    "no prefill pool": (Plan(num_prefill=0), "stalls"),
    "few blocks": (Plan(decode_blocks=190, requests_per_s=10), "memory_full"),
    "TCP instead of RDMA": (
        Plan(pairs=_links(path="tcp", busy_bytes_per_s=2e9, exposed_p95_ms=400.0)), "slow_link",
    ),
    "a slow link": (
        Plan(pairs=_links(busy_bytes_per_s=5e9, exposed_p95_ms=60.0)), "slow_link",
    ),
    "a throttled decode worker": (Plan(slow={"decode-1": 1.6}), "slow_worker"),
    "a throttled prefill worker": (Plan(slow={"prefill-2": 2.0}), "slow_worker"),
    "a young prefill worker": (
        Plan(joined_before_end_s={"prefill-1": 15.0}, requests_per_s=12, num_prefixes=60,
             prefix_blocks=(4000,)), "cold_cache",
    ),
    "a small cache on one worker": (
        Plan(prefix_blocks=(900, 900, 30), requests_per_s=9), "cache_thrash",
    ),
    "targets that cannot be met": (
        Plan(targets=Targets(ttft_ms=20, tpot_ms=5)), "targets",
    ),
    "an index behind the workers": (
        Plan(hint_lag_evictions=12, prefix_blocks=(300,), num_prefixes=40), "stale_hints",
    ),
    "requests that fail": (Plan(fail_share=0.02), "faults"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("seed", range(times(1, 5)))
def test_the_planted_fault_is_named_and_no_other(name: str, seed: int) -> None:
    plan, fault = PLANTED[name]
    examination = examine(observe(replace(plan, seed=seed)))
    assert examination.is_conclusive
    found = [each.rule for each in examination.findings]
    assert found == ([fault] if fault else []), [each.text for each in examination.findings]
    assert not {each.rule for each in examination.passed} & set(found)


def test_every_rule_has_a_planted_fault() -> None:
    judgements = {each.name for each in RULES if not each.is_fact} | {"pool_balance", "slow_link"}
    assert {fault for _, fault in PLANTED.values() if fault} == judgements
