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
from tests.effort import some, times
from tests.faults.faulty_fleet import faulty_fleet
from tests.faults.faulty_worker import FETCH_SLACK
from tests.integration.fleets import all_counters, assert_as_expected, complete
from tests.integration.reference import BLOCK, NUM_TOKENS, Reference

LONGEST = times(700, 2000)
POOL = times(60, 160)  # blocks: the longest prompt, and another one
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
        found = {"BATON_PLACEMENT": "load", FETCH_SLACK: "-100"}
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


@pytest.mark.parametrize("case", some(CASES, 1), ids=lambda case: "-".join(map(str, case)))
def test_the_tokens_are_those_of_one_worker(
    references: list[Reference], case: Case, tmp_path: Path
) -> None:
    rng = random.Random(str(case))
    asked = [each for each in references if 300 <= len(each.prompt) <= LONGEST]
    settings = {"prefill": case.prefill, "decode": 2, "num_blocks": POOL, "dtype": "float32"}
    with faulty_fleet(
        case.environment(tmp_path), transport=case.transport, kv_checksum=True, **settings
    ) as faulty:

        def run(each: Reference) -> list[int]:
            """The tokens after a prompt, of which some worker has just had the beginning."""
            length = BLOCK * rng.randint(len(each.prompt) // BLOCK // 2, len(each.prompt) // BLOCK)
            for prompt, max_tokens in ((each.prompt[:length], 1), (each.prompt, NUM_TOKENS)):
                for role in (Role.PREFILL, Role.DECODE) if case.evicts else ():
                    faulty.spoil(role, "evict")
                answer = complete(faulty.fleet, list(prompt), max_tokens=max_tokens)
            return list(answer["choices"][0]["token_ids"])

        for _ in range(ROUNDS):
            rng.shuffle(asked)
            with ThreadPoolExecutor(1 if case.evicts else 2) as pool:
                assert_as_expected(asked, list(pool.map(run, asked)))
        found: Counter[str] = Counter()
        for worker in all_counters(faulty.fleet).values():
            found.update(worker)
        assert found["fetched_tokens"] > 0
        assert found["host_tier_failures"] == found["disk_tier_failures"] == 0
        if case.tier != "no tier":
            assert found["loaded_tokens"] > 0
        if case.evicts:
            assert found["fetch_missing_blocks"] > 0
