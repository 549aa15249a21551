"""Pools that hold little more than one long request, and many requests at once.

Prompts queue on both sides, handoffs wait for blocks, running sequences are preempted and
recomputed; every request still gets its tokens, and the fleet comes back to rest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cli.fleet import Fleet
from tests.effort import some, times
from tests.integration.fleets import (
    all_counters,
    assert_as_expected,
    complete,
    complete_all,
    running_fleet,
)
from tests.integration.one_engine import tokens_of_one_engine
from tests.integration.reference import BLOCK, DEMO_MODEL, NUM_TOKENS, Reference

LONGEST = 520
NUM_BLOCKS = -(-(LONGEST + NUM_TOKENS) // BLOCK) + 1
NUM_REQUESTS = times(24, 48)
LONG_OUTPUT = times(160, 200)
NUM_YOUNGEST = 4
"""Of the sequences that outgrow the pool; the youngest are preempted first."""
SEED = 7


FLEETS = {"nixl-checksum-one-step-ahead": ("nixl", True, "on"), "shm": ("shm", False, "off")}


@pytest.fixture(scope="module", params=some(FLEETS, 1))
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    transport, kv_checksum, one_step_ahead = FLEETS[request.param]
    with running_fleet(
        environment={"BATON_ONE_STEP_AHEAD": one_step_ahead},
        prefill=2,
        decode=2,
        transport=transport,
        kv_checksum=kv_checksum,
        num_blocks=NUM_BLOCKS,
        chunk_max_tokens=64,
        local_prefill_threshold_tokens=16,
    ) as fleet:
        yield fleet


def test_tiny_pools_serve_many_requests_at_once(fleet: Fleet, references: list[Reference]) -> None:
    print(f"seed {SEED}")
    fitting = [reference for reference in references if len(reference.prompt) <= LONGEST]
    chosen = random.Random(SEED).choices(fitting, k=NUM_REQUESTS)
    assert_as_expected(chosen, complete_all(fleet, chosen, NUM_TOKENS, at_once=NUM_REQUESTS))
    now = all_counters(fleet)
    handoffs = now["decode-1"]["handoffs"] + now["decode-2"]["handoffs"]
    assert handoffs > 0, "some prompts were meant to move"


def test_workers_that_admit_in_different_orders_do_not_wait_for_each_other(
    fleet: Fleet, references: list[Reference]
) -> None:
    """Long prompts of which each pool holds one: priorities, and grammars that are still being
    compiled, let the decode worker take other prompts first than the prefill worker."""
    long = [each for each in references if 300 <= len(each.prompt) <= LONGEST]
    rng = random.Random(SEED)
    chosen = rng.choices(long, k=times(10, 16))
    before = all_counters(fleet)

    def run(number: int) -> list[int]:
        changes: dict[str, object] = {"cache_salt": f"orders {number}"}
        if number % 2:
            changes["structured_outputs"] = {"regex": f"(.|\\n){{0,{20_000 + number}}}"}
        if number % 3 == 0:
            changes["priority"] = number % 4
        prompt = list(chosen[number].prompt)
        answer = complete(fleet, prompt, max_tokens=NUM_TOKENS, **changes)
        return list(answer["choices"][0]["token_ids"])

    with ThreadPoolExecutor(len(chosen)) as pool:
        outputs = list(pool.map(run, range(len(chosen))))
    assert_as_expected(chosen, outputs)
    now = all_counters(fleet)
    assert sum(each["handoffs"] for each in now.values()) > sum(
        each["handoffs"] for each in before.values()
    )
    assert not any(each.get("stalls") for each in now.values())


def test_sequences_that_outgrow_the_pool_together_are_preempted_and_resume(
    fleet: Fleet, references: list[Reference]
) -> None:
    """Prompts of few blocks that grow to more than both pools hold. One request has them all, so
    that they run together however slow its client is."""
    short = [reference for reference in references if len(reference.prompt) <= 2 * BLOCK][:12]
    answer = complete(fleet, [list(each.prompt) for each in short], max_tokens=LONG_OUTPUT)
    outputs = [each["token_ids"] for each in answer["choices"]]
    assert [len(output) for output in outputs] == [LONG_OUTPUT] * len(short)
    for reference, output in zip(short, outputs, strict=True):
        assert output[:NUM_TOKENS] == list(reference.output)
    youngest = [each.prompt for each in short[-NUM_YOUNGEST:]]
    alone = tokens_of_one_engine(DEMO_MODEL, youngest, LONG_OUTPUT)
    assert outputs[-NUM_YOUNGEST:] == alone, "also behind what was computed again"
    now = all_counters(fleet)
    preemptions = now["decode-1"]["preemptions"] + now["decode-2"]["preemptions"]
    assert preemptions > 0, "the pools were meant to be too small"
