"""How many tokens of which prompts a step computes."""

from __future__ import annotations

from typing import Any

import pytest

from scheduling.block_manager import BlockManager
from scheduling.scheduler import Scheduler, SchedulerConfig
from scheduling.step_model import StepModel
from tests.sequences import greedy, sequence_of

BLOCK = 4
MODEL = StepModel(fixed_s=1e-3, per_token_s=1e-4, per_attended_s=3e-7)
"""A prefix of a few hundred tokens costs as much as the tokens themselves."""


def scheduler(**limits: Any) -> Scheduler:
    config = SchedulerConfig(BLOCK, chunk_min_tokens=BLOCK, chunk_max_tokens=64, **limits)
    return Scheduler(config, BlockManager(400), MODEL)


def add(to: Scheduler, name: str, num_tokens: int) -> None:
    first = 1000 * len(to.sequences)
    tokens = range(first, first + num_tokens)
    to.add(sequence_of(tokens, greedy(1), BLOCK, request_id=name, prefill_only=True))


def steps(of: Scheduler) -> list[list[tuple[str, int]]]:
    """The chunks of each step until the prompts are computed."""
    found = []
    while (batch := of.schedule(0.0)).chunks:
        found.append([(chunk.sequence.request_id, chunk.num_tokens) for chunk in batch.chunks])
        of.launched(batch)
    return found


def test_a_short_prompt_has_room_beside_the_chunk_of_a_long_one() -> None:
    one = scheduler(prompt_max_tokens=40)
    add(one, "long", 120)
    add(one, "short", 20)
    assert steps(one) == [[("long", 40), ("short", 20)], [("long", 40)], [("long", 40)]]


def test_without_a_limit_of_its_own_a_prompt_takes_the_whole_step() -> None:
    one = scheduler()
    add(one, "long", 120)
    add(one, "short", 20)
    assert steps(one) == [[("long", 64)], [("long", 56), ("short", 8)], [("short", 12)]]


@pytest.mark.parametrize("is_even", [False, True])
def test_even_steps_take_the_time_of_a_full_one_without_context(is_even: bool) -> None:
    one = scheduler(even_steps=is_even)
    add(one, "long", 600)
    times = []
    while (batch := one.schedule(0.0)).chunks:
        times.append(MODEL.predict(batch.cost))
        one.launched(batch)
    whole = times[:-1]  # but the rest of the prompt
    assert (max(whole) <= times[0]) is is_even
    assert min(whole) > 0.8 * times[0]
    assert (len(times) == 10) is not is_even


def test_a_chunk_limit_below_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_max_tokens must be at least the block size"):
        scheduler(prompt_max_tokens=3)
