"""The tokens of one worker, wherever the KV of a prompt's beginning was found: in a cache, in a
tier, on other workers that have parts of it, and on holders that evict while they are asked."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from protocol.messages import Role
from tests.effort import some
from tests.faults.faulty_fleet import FaultyFleet, faulty_fleet
from tests.integration.fleets import all_counters, assert_as_expected, complete, complete_all
from tests.integration.reference import BLOCK, NUM_TOKENS, Reference

POOL = 160  # blocks: the longest prompt, and another one
BLOCK_BYTES = 16 << 10
ROUNDS = 2


class Case(NamedTuple):
    """A fleet: how it moves blocks, what is below its pools, who computes prompts, and whether
    holders evict in the middle of a fetch."""

    transport: str
    tier: str
    prefill: int
    evicts: bool

    def environment(self, folder: Path) -> dict[str, str]:
        """The workers' tiers."""
        found = {"BATON_PLACEMENT": "load"}
        if self.tier != "no tier":
            blocks = {"host": 2000, "disk": 2 * POOL}[self.tier]
            found["BATON_HOST_TIER_BYTES"] = str(blocks * BLOCK_BYTES)
        if self.tier == "disk":
            found["BATON_DISK_TIER_DIR"] = str(folder)
            found["BATON_DISK_TIER_BYTES"] = str(2000 * (BLOCK_BYTES + 4096))
        return found


CASES = [
    Case(transport, tier, prefill, evicts)
    for transport in ("nixl", "shm")
    for tier in ("disk", "host", "no tier")
    for prefill in (2, 0)
    for evicts in (True, False)
]


def beginnings(references: list[Reference], rng: random.Random) -> list[list[int]]:
    """Parts of the prompts, for workers that hold some of their blocks."""
    return [
        list(each.prompt[: BLOCK * rng.randint(1, len(each.prompt) // BLOCK)])
        for each in references
    ]


@pytest.mark.parametrize("case", some(CASES, 1), ids=lambda case: "-".join(map(str, case)))
def test_the_tokens_are_those_of_one_worker(
    references: list[Reference], case: Case, tmp_path: Path
) -> None:
    rng = random.Random(str(case))
    asked = [each for each in references if len(each.prompt) >= 300]
    settings = {"prefill": case.prefill, "decode": 2, "num_blocks": POOL, "dtype": "float32"}
    with faulty_fleet(
        case.environment(tmp_path), transport=case.transport, kv_checksum=True, **settings
    ) as faulty:
        for _ in range(ROUNDS):
            rng.shuffle(asked)
            spoil(faulty, case)
            with ThreadPoolExecutor(2) as pool:
                list(
                    pool.map(
                        lambda p: complete(faulty.fleet, p, max_tokens=1), beginnings(asked, rng)
                    )
                )
            spoil(faulty, case)
            assert_as_expected(asked, complete_all(faulty.fleet, asked, NUM_TOKENS, at_once=2))
        found: Counter[str] = Counter()
        for worker in all_counters(faulty.fleet).values():
            found.update(worker)
        assert found["fetched_tokens"] > 0
        assert found["host_tier_failures"] == found["disk_tier_failures"] == 0
        if case.tier != "no tier":
            assert found["loaded_tokens"] > 0
        if case.evicts:
            assert found["fetch_missing_blocks"] > 0


def spoil(faulty: FaultyFleet, case: Case) -> None:
    if case.evicts:
        for role in (Role.PREFILL, Role.DECODE):
            faulty.spoil(role, "evict")
