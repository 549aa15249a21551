"""Hints of clients in a pool that other prompts fill again and again: who says that it will be back
computes only what is new then, and nobody can protect more than a part of the pool."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from cli.fleet import Fleet
from scheduling.retention import OWNER_SHARE
from tests.integration.fleets import complete, running_fleet, wait_for, workers
from tests.integration.reference import BLOCK

POOL = 120  # blocks
HISTORY, OTHERS, NEW = 20 * BLOCK, 30 * BLOCK, 10
HINT = {"cache_retention": {"seconds": 600, "priority": 80}}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet(prefill=0, decode=1, num_blocks=POOL) as fleet:
        yield fleet


def ask(fleet: Fleet, prompt: list[int], **fields: object) -> int:
    """The tokens of a prompt that are computed."""
    usage = complete(fleet, prompt, max_tokens=1, **fields)["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def prompts(rng: Random, length: int) -> Iterator[list[int]]:
    while True:
        yield [rng.randrange(3, 500) for _ in range(length)]


def retained(fleet: Fleet) -> int:
    (worker,) = workers(fleet).values()
    return int(worker["blocks_retained"])


@pytest.mark.parametrize("hint", [HINT, {}], ids=["hint", "none"])
def test_a_turn_after_a_pause_computes_what_is_new(fleet: Fleet, hint: dict[str, object]) -> None:
    rng = Random(len(hint))
    history = next(prompts(rng, HISTORY))
    ask(fleet, history, **hint)
    others = [next(prompts(rng, OTHERS)) for _ in range(8)]  # twice the pool
    for each in others:
        ask(fleet, each)
    assert ask(fleet, others[-1]) <= BLOCK, "the others keep what fits beside"
    computed = ask(fleet, [*history, *next(prompts(rng, NEW))])
    assert computed == (NEW if hint else HISTORY + NEW)


def test_nobody_protects_more_than_a_part_of_the_pool(fleet: Fleet) -> None:
    rng = Random(7)
    for _, each in zip(range(6), prompts(rng, OTHERS), strict=False):
        ask(fleet, each, **HINT)
    most = int(OWNER_SHARE * POOL)
    wait_for("protected blocks", lambda: retained(fleet) == most)
    other = next(prompts(rng, 2 * OTHERS))
    ask(fleet, other)
    assert ask(fleet, other) <= BLOCK, "three quarters of the pool are for everybody"
