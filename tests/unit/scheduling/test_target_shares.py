"""Prompts of a prefill worker that wait for decode workers hold a share of its pool for each."""

from __future__ import annotations

from tests.unit.scheduling.scheduler_harness import (
    BLOCK,
    admitted,
    make_prompt,
    make_scheduler,
    make_sequence,
    run_step,
)

# -- memory that waits for another worker -------------------------------------------------------


def test_a_remote_prompt_that_its_source_has_not_begun_holds_nothing_and_holds_up_nobody() -> None:
    scheduler = make_scheduler(num_blocks=4)
    waits = make_sequence("waits", list(range(12)), remote=True, priority=9)
    scheduler.add(waits)
    scheduler.add(make_sequence("local", list(range(20, 32))))
    batch = scheduler.schedule(0.0)
    assert [chunk.sequence.request_id for chunk in batch.chunks] == ["local"]
    assert (batch.received, waits.block_table, scheduler.roster.num_held_up) == ([], [], 0)
    waits.source_has_begun = True
    assert scheduler.roster.num_held_up == 1
    assert scheduler.roster.blocks_waiting == 3


def test_prompts_that_wait_for_one_target_leave_room_for_those_of_others() -> None:
    scheduler = make_scheduler(num_blocks=8, chunk_max_tokens=64)
    scheduler.shares.num_targets = 2
    for prompt in (
        make_prompt("a", 3, "full"),
        make_prompt("b", 3, "full"),
        make_prompt("c", 1, "full"),  # would fit, but "b" is older
        make_prompt("d", 4, "idle"),
    ):
        scheduler.add(prompt)
    assert admitted(run_step(scheduler)) == ["a", "d"]
    assert admitted(run_step(scheduler)) == []
    (a,) = (each for each in scheduler.shares._waiting.values() if each.request_id == "a")
    scheduler.shares.release(a)
    assert admitted(run_step(scheduler)) == ["c"], "it is granted, and not gone yet: no room for b"
    scheduler.release_blocks(a)
    assert admitted(run_step(scheduler)) == ["b"]


def test_a_target_may_always_have_one_prompt_and_a_single_target_the_whole_pool() -> None:
    scheduler = make_scheduler(num_blocks=8, chunk_max_tokens=64)
    scheduler.shares.num_targets = 2
    scheduler.add(make_prompt("a", 7, "full"))
    assert admitted(run_step(scheduler)) == ["a"]
    alone = make_scheduler(num_blocks=8, chunk_max_tokens=64)
    alone.add(make_prompt("a", 4, "full"))
    alone.add(make_prompt("b", 4, "full"))
    assert admitted(run_step(alone)) == ["a", "b"]


def test_what_fits_beside_stuck_blocks() -> None:
    scheduler = make_scheduler(num_blocks=6)
    prompt = list(range(16))
    scheduler.add(first := make_sequence("first", prompt, remote=True, source_has_begun=True))
    scheduler.schedule(0.0)
    stuck = set(first.block_table)
    scheduler.add(again := make_sequence("again", prompt))
    assert not scheduler.fits_beside(again, stuck), "four blocks beside four of six"
    scheduler.publish_arrived(first, [0, 1])
    assert scheduler.fits_beside(again, stuck), "two of the stuck ones hold its prefix"
    assert scheduler.fits_beside(make_sequence("small", [1] * 8), stuck)
    assert not scheduler.fits_beside(make_sequence("other", [1] * 12), stuck)


def test_prompts_with_a_common_prefix_hold_it_once() -> None:
    scheduler = make_scheduler(num_blocks=12, chunk_max_tokens=64)
    scheduler.shares.num_targets = 2
    prefix = list(range(4 * BLOCK))
    prompts = [
        make_sequence(name, [*prefix, *[ord(name)] * BLOCK], prefill_only=True, target="full")
        for name in "abc"
    ]
    for prompt in prompts:
        scheduler.add(prompt)
        run_step(scheduler)
    assert [bool(prompt.block_table) for prompt in prompts] == [True, True, False]
    assert scheduler.blocks.num_pinned == 6, "half of the pool: the prefix and two blocks"


def test_a_prompt_that_ends_without_a_grant_leaves_its_share() -> None:
    scheduler = make_scheduler(num_blocks=8, chunk_max_tokens=64)
    scheduler.shares.num_targets = 2
    gone = make_prompt("a", 4, "full")
    scheduler.add(gone)
    run_step(scheduler)
    scheduler.release_blocks(gone)
    scheduler.add(make_prompt("b", 4, "full"))
    assert admitted(run_step(scheduler)) == ["b"]
    assert list(scheduler.shares._waiting) == [("b", 0)]
