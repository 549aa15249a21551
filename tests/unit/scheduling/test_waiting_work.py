"""What the waiting sequences will need, each shared block once."""

from __future__ import annotations

from tests.unit.scheduling.scheduler_harness import (
    BLOCK,
    drain,
    make_scheduler,
    make_sequence,
    run_step,
)

SHARED = list(range(8 * BLOCK))


def test_blocks_that_several_wait_for_count_once() -> None:
    scheduler = make_scheduler(num_blocks=64)
    for number in range(10):
        scheduler.add(make_sequence(f"s{number}", [*SHARED, 1000 + number]))
    assert scheduler.roster.blocks_waiting == 8 + 10
    assert scheduler.roster.queued_tokens == 8 * BLOCK + 10


def test_tokens_of_a_cached_prefix_are_not_queued() -> None:
    scheduler = make_scheduler(num_blocks=64, max_batch_size=1)
    scheduler.add(make_sequence("warms", [*SHARED, 1], max_tokens=1))
    drain(scheduler)
    for number in range(10):
        scheduler.add(make_sequence(f"s{number}", [*SHARED, 1000 + number]))
    assert scheduler.roster.queued_tokens == 10
    assert scheduler.roster.blocks_waiting == 8 + 10


def test_remote_prompts_need_blocks_and_no_computing() -> None:
    scheduler = make_scheduler(num_blocks=64)
    for number in range(3):
        scheduler.add(make_sequence(f"s{number}", [*SHARED, 1000 + number], remote=True))
    assert (scheduler.roster.queued_tokens, scheduler.roster.blocks_waiting) == (0, 8 + 3)


def test_nothing_is_left_when_nothing_waits() -> None:
    scheduler = make_scheduler(num_blocks=12, max_batch_size=2)
    for number in range(6):
        tokens = [*SHARED[: 3 * BLOCK], 1000 + number]
        scheduler.add(make_sequence(f"s{number}", tokens, max_tokens=20))
    preempted = []
    while scheduler.sequences:
        preempted += run_step(scheduler, token=len(preempted)).preempted
        waiting = scheduler.num_waiting
        assert (scheduler.roster.blocks_waiting > 0) == (waiting > 0)
    assert preempted, "preempted ones wait again"
    assert (scheduler.roster.queued_tokens, scheduler.roster.blocks_waiting) == (0, 0)
