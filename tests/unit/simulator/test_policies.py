"""Other rules of placement: whom each chooses, and that a fleet can be run by every one."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from protocol.errors import ConfigError
from protocol.messages import Role
from router.routing.pace import pace_of
from router.routing.placement import PlacementQuery
from router.routing.prediction import WorkerSpeed
from simulator.fleet import Fleet, FleetSpec
from simulator.policies import pools
from simulator.policies.names import PARTS, POLICIES, RULES, policy_names
from simulator.policies.pools import PoolLoad, Rule
from simulator.traces.sessions import Trace
from tests.paths import ROOT
from tests.unit.simulator.fleets import LinearTimes, served, single, small_fleet, worker_spec

QUERY = PlacementQuery(1000, 1100, 10)


def load(name: str, step_ms: float = 1.0, **changes: Any) -> PoolLoad:
    numbers: dict[str, Any] = {
        "num_requests": 0, "queued_tokens": 0, "blocks_total": 1000, "blocks_claimed": 0,
        "held_blocks": 0, "expected_blocks": 0, "max_context": 10_000,
    } | changes  # fmt: skip
    speed = WorkerSpeed(1000 * step_ms, 1.0, 0.0, 512, 50.0, 0, 0)
    return PoolLoad(name, pace=pace_of(speed, speed, numbers["queued_tokens"], 1, 0), **numbers)


@pytest.mark.parametrize(
    ("rule", "loser", "winner"),
    [
        (pools.least_loaded, {"num_requests": 2}, {"num_requests": 1, "queued_tokens": 900}),
        (pools.power_of_two, {"num_requests": 2}, {"num_requests": 1}),
        (pools.prefix_affinity, {}, {"held_blocks": 1, "expected_blocks": 1, "num_requests": 99}),
        (pools.lmetric, {"num_requests": 3}, {"num_requests": 5, "expected_blocks": 60}),
        (pools.aibrix, {"num_requests": 1}, {"queued_tokens": 3000}),
        (pools.aibrix, {"blocks_claimed": 900}, {"queued_tokens": 2000}),
        (pools.dynamo, {"blocks_claimed": 200}, {"queued_tokens": 1500}),
        (pools.dynamo, {}, {"expected_blocks": 50, "blocks_claimed": 40}),
        (pools.sglang, {}, {"expected_blocks": 60, "num_requests": 60}),
        (pools.sglang, {"expected_blocks": 60, "num_requests": 99}, {"num_requests": 2}),
        (pools.sglang, {"expected_blocks": 40, "blocks_claimed": 9}, {"blocks_claimed": 3}),
        (pools.llm_d, {}, {"expected_blocks": 85, "queued_tokens": 4000}),
        (pools.llm_d, {"expected_blocks": 70, "queued_tokens": 10}, {}),
        (
            pools.llm_d,
            {"expected_blocks": 85, "queued_tokens": 9000, "step_ms": 300.0},
            {"step_ms": 10.0},
        ),
    ],
)
def test_whom_a_rule_prefers(rule: Rule, loser: dict[str, Any], winner: dict[str, Any]) -> None:
    for seed in range(5):
        loads = [load("loser", **loser), load("winner", **winner)]
        assert rule(QUERY, loads, random.Random(seed)).worker_id == "winner"
        assert rule(QUERY, loads[::-1], random.Random(seed)).worker_id == "winner"


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("prefill", [0, 2])
def test_a_fleet_runs_by_every_policy(name: str, prefill: int) -> None:
    requests = [
        single(number / 20, 20 + number, 5, ((0, 3), (100 * number + 100, 2)))
        for number in range(12)
    ]
    fleet = small_fleet(prefill, 2, policy=POLICIES[name]())
    outcome = served(fleet, *requests, single(1.0, 9999, 1))
    assert [each.failure for each in outcome.requests] == [""] * 12 + ["PromptTooLong"]
    if name == "always-split":
        assert all(each.prefill for each in outcome.requests[:12]) == bool(prefill)
    if name == "never-split":
        assert not any(each.prefill for each in outcome.requests)


def test_round_robin_takes_turns() -> None:
    fleet = small_fleet(0, 3, policy=POLICIES["round-robin"]())
    outcome = served(fleet, *(single(float(number), 8, 2) for number in range(6)))
    names = [each.decode for each in outcome.requests]
    assert names[:3] == names[3:]
    assert len(set(names)) == 3


def test_without_pending_load_requests_of_one_instant_pile_up() -> None:
    def most(name: str) -> int:
        fleet = small_fleet(0, 4, num_blocks=400, policy=POLICIES[name]())
        outcome = served(fleet, *(single(number / 1000, 40 + number, 3) for number in range(16)))
        return max(Counter(each.decode for each in outcome.requests).values())

    assert most("baton") == 4
    assert most("no-pending") > 4


def test_without_prediction_a_slow_worker_gets_requests_like_a_fast_one() -> None:
    def on_slow(name: str) -> int:
        fast = worker_spec(Role.DECODE, 400)
        slow = replace(fast, times=LinearTimes(0.05, 0.005))
        spec = FleetSpec(((slow, 1), (fast, 1)), POLICIES[name], link_bytes_per_s=1e9)
        trace = Trace("small", [single(number / 2, 40 + number, 3) for number in range(40)])
        outcome = Fleet(spec, seed=7).run(trace)
        return sum(each.decode == "decode-0" for each in outcome.requests[20:])

    assert on_slow("baton") == 0
    assert on_slow("no-prediction") > 4


def test_names() -> None:
    assert policy_names(["all"]) == list(RULES)
    assert policy_names(["ablation"]) == ["baton", *PARTS]
    assert policy_names(["lmetric", "baton", "lmetric"]) == ["lmetric", "baton"]
    with pytest.raises(ConfigError, match="use one of baton, random"):
        policy_names(["bato"])


def test_every_policy_has_a_row_in_the_document() -> None:
    text = (ROOT / "docs/simulation.md").read_text(encoding="utf-8")
    section = text.partition("\n## Policies\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} == {
        *POLICIES,
        "--policies",
    }
