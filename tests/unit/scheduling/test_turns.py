"""Whose turn it is: priorities that age, and equal turns for the owners of keys."""

from __future__ import annotations

from collections import Counter

import pytest

from scheduling.queues.overtaking import MAX_TRIES, Overtaking
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence, SequenceState
from scheduling.shares import MAX_IDLE_SHARES
from tests.unit.scheduling.scheduler_harness import make_scheduler, make_sequence, run_step

AGING_S = 3.0


def prompt(number: int, length: int = 16) -> list[int]:
    return list(range(number * 1000, number * 1000 + length))


def admissions(scheduler: Scheduler, until: Sequence, now: float = 0.0) -> list[Sequence]:
    """The sequences that are admitted, in order, up to one of them."""
    found: list[Sequence] = []
    for _ in range(10_000):
        found += [chunk.sequence for chunk in run_step(scheduler, now).chunks if chunk.start == 0]
        if until in found:
            return found[: found.index(until) + 1]
    raise AssertionError("it was never admitted")


def test_a_step_of_priority_is_worth_some_seconds_of_waiting() -> None:
    scheduler = make_scheduler(max_batch_size=1, aging_s=AGING_S)
    scheduler.add(make_sequence("old", prompt(1), max_tokens=1, arrival=0.0))
    scheduler.add(make_sequence("urgent", prompt(2), max_tokens=1, priority=2, arrival=5.0))
    scheduler.add(make_sequence("late", prompt(3), max_tokens=1, priority=2, arrival=7.0))
    scheduler.add(make_sequence("idle", prompt(4), max_tokens=1, priority=-1, arrival=0.0))
    order = [run_step(scheduler, 8.0).chunks[0].sequence.request_id for _ in range(4)]
    assert order == ["urgent", "old", "late", "idle"]


def test_an_old_backlog_of_low_priority_does_not_hold_up_an_urgent_newcomer() -> None:
    """Waiting for long does not turn the order into that of arrival."""
    scheduler = make_scheduler(max_batch_size=1, aging_s=AGING_S)
    for number in range(50):
        scheduler.add(
            make_sequence(f"low{number}", prompt(number), max_tokens=1, arrival=number * 0.1)
        )
    urgent = make_sequence("urgent", prompt(99), max_tokens=1, priority=30, arrival=60.0)
    scheduler.add(urgent)
    assert admissions(scheduler, urgent, now=60.0) == [urgent]


def test_a_flood_of_high_priority_holds_up_others_for_a_bounded_time_only() -> None:
    scheduler = make_scheduler(max_batch_size=1, aging_s=AGING_S)
    low = make_sequence("low", prompt(0), max_tokens=1, arrival=0.0)
    scheduler.add(low)
    now = 0.0
    for number in range(1, 1000):
        now += 0.5
        scheduler.add(
            make_sequence(f"f{number}", prompt(number), max_tokens=1, priority=10, arrival=now)
        )
        run_step(scheduler, now)
        if low.state is not SequenceState.WAITING:
            break
    assert now == pytest.approx(10 * AGING_S, abs=1.0)


def test_who_has_waited_long_is_not_preempted_for_newcomers_of_high_priority() -> None:
    scheduler = make_scheduler(num_blocks=8, max_batch_size=2, aging_s=AGING_S)
    old = make_sequence("old", prompt(1, 11), max_tokens=8, arrival=0.0)
    new = make_sequence("new", prompt(2, 11), max_tokens=8, priority=1, arrival=60.0)
    scheduler.add(old)
    scheduler.add(new)
    preempted = [each for _ in range(30) for each in run_step(scheduler, 60.0).preempted]
    assert preempted
    assert set(preempted) == {new}


def flood(scheduler: Scheduler, share: str, count: int, priority: int = 0, start: int = 0) -> None:
    for number in range(start, start + count):
        scheduler.add(
            make_sequence(
                f"{share}{number}",
                prompt(sum(map(ord, share)) * 100 + number),
                max_tokens=1,
                share=share,
                priority=priority,
            )
        )


@pytest.mark.parametrize("priority", [0, 10, 1000])
def test_a_flood_of_one_key_delays_another_by_no_more_than_equal_turns(priority: int) -> None:
    """Two keys with equal turns: the other's prompt is the first or the second from now on."""
    scheduler = make_scheduler(max_batch_size=1)
    flood(scheduler, "flood", 200, priority)
    for _ in range(20):
        run_step(scheduler)
    for number in range(5):
        other = make_sequence(f"o{number}", prompt(9000 + number), max_tokens=1, share="other")
        scheduler.add(other)
        assert len(admissions(scheduler, other)) <= 2
        run_step(scheduler)


def test_keys_that_flood_get_equal_turns_in_tokens() -> None:
    scheduler = make_scheduler(max_batch_size=1, chunk_max_tokens=64)
    flood(scheduler, "short", 400)
    for number in range(100):
        tokens = prompt(5000 + number, 64)
        scheduler.add(make_sequence(f"l{number}", tokens, max_tokens=1, share="long"))
    computed: Counter[str] = Counter()
    for _ in range(100):
        for chunk in run_step(scheduler).chunks:
            computed[chunk.sequence.share] += chunk.num_tokens
    assert computed["short"] == pytest.approx(computed["long"], abs=2 * 64)


def test_requests_without_a_key_are_one_share_beside_others() -> None:
    """A router without keys, and one with keys, serve the same workers."""
    scheduler = make_scheduler(max_batch_size=1)
    flood(scheduler, "", 100)
    flood(scheduler, "key", 100)
    batches = [run_step(scheduler) for _ in range(40)]
    turns = Counter(chunk.sequence.share for each in batches for chunk in each.chunks)
    assert abs(turns[""] - turns["key"]) <= 2


def test_what_running_streams_generate_counts_too() -> None:
    """A key with few long answers has had its turns when a key with short ones comes."""
    scheduler = make_scheduler(num_blocks=200, max_batch_size=4)
    for number in range(4):
        tokens = prompt(number)
        scheduler.add(make_sequence(f"s{number}", tokens, max_tokens=60, share="streams"))
    for _ in range(40):
        run_step(scheduler)
    scheduler.add(make_sequence("s9", prompt(9), max_tokens=60, share="streams"))
    flood(scheduler, "other", 3)
    batches = [run_step(scheduler) for _ in range(60)]
    order = [chunk.sequence.share for each in batches for chunk in each.chunks]
    assert order == ["other", "other", "other", "streams"]


def test_a_key_that_was_idle_has_saved_no_turns() -> None:
    scheduler = make_scheduler(max_batch_size=1)
    flood(scheduler, "busy", 100)
    for _ in range(50):
        run_step(scheduler)
    flood(scheduler, "idle", 20)
    batches = [run_step(scheduler) for _ in range(20)]
    turns = Counter(chunk.sequence.share for each in batches for chunk in each.chunks)
    assert abs(turns["busy"] - turns["idle"]) <= 2


def test_a_key_that_waits_again_after_a_step_without_waiting_has_saved_no_turns() -> None:
    scheduler = make_scheduler(num_blocks=200, max_batch_size=2, chunk_max_tokens=32)
    scheduler.add(make_sequence("long", prompt(0), max_tokens=200, share="busy"))
    while scheduler.sequences:
        run_step(scheduler)
    flood(scheduler, "calm", 1)
    flood(scheduler, "busy", 1)
    assert len(run_step(scheduler).chunks) == 2
    run_step(scheduler)  # nothing waits
    flood(scheduler, "calm", 20, start=1)
    flood(scheduler, "busy", 20, start=1)
    batches = [run_step(scheduler) for _ in range(5)]
    turns = Counter(chunk.sequence.share for each in batches for chunk in each.chunks)
    assert abs(turns["busy"] - turns["calm"]) <= 2


@pytest.mark.parametrize(("priority", "cost"), [(-2, 4), (-9, 32)])
def test_requests_of_a_late_priority_cost_their_key_more_turns(priority: int, cost: int) -> None:
    """A batch job yields to the others, and is served nevertheless."""
    scheduler = make_scheduler(max_batch_size=1)
    flood(scheduler, "batch", 100, priority=priority)
    flood(scheduler, "plain", 200)
    batches = [run_step(scheduler) for _ in range(4 * cost + 8)]
    turns = Counter(chunk.sequence.share for each in batches for chunk in each.chunks)
    assert turns["plain"] == pytest.approx(cost * turns["batch"], abs=cost)
    assert turns["batch"] > 2


def test_what_is_known_of_shares_is_bounded() -> None:
    scheduler = make_scheduler(max_batch_size=1)
    for number in range(3000):
        flood(scheduler, f"key{number}", 1)
        run_step(scheduler)
    assert len(scheduler.turns) <= MAX_IDLE_SHARES + 1


# -- who may pass one that does not fit ---------------------------------------------------------


def test_small_prompts_pass_a_large_one_that_does_not_fit() -> None:
    """Twenty prompts of two blocks need not wait for one of 40."""
    scheduler = make_scheduler(num_blocks=60, max_batch_size=64, chunk_max_tokens=400)
    scheduler.add(make_sequence("runs", prompt(0, 100), max_tokens=100))
    run_step(scheduler)
    large = make_sequence("large", prompt(1, 160), max_tokens=1)
    scheduler.add(large)
    small = [make_sequence(f"s{n}", prompt(2 + n, 5), max_tokens=2) for n in range(20)]
    for sequence in small:
        scheduler.add(sequence)
    steps = 0
    while any(each.state is not SequenceState.FINISHED for each in small):
        run_step(scheduler)
        steps += 1
    assert steps <= 10
    assert large.state is SequenceState.WAITING


def test_a_large_prompt_is_passed_by_as_many_blocks_as_it_needs_and_no_more() -> None:
    scheduler = make_scheduler(num_blocks=60, max_batch_size=64, chunk_max_tokens=400)
    runs = make_sequence("runs", prompt(0, 100), max_tokens=100)
    scheduler.add(runs)
    run_step(scheduler)
    large = make_sequence("large", prompt(1, 160), max_tokens=1)
    scheduler.add(large)
    admitted: list[Sequence] = []
    number = 0
    while large.state is SequenceState.WAITING:
        for _ in range(4):
            number += 1
            scheduler.add(make_sequence(f"s{number}", prompt(1 + number, 5), max_tokens=1))
        admitted += [chunk.sequence for chunk in run_step(scheduler).chunks if chunk.start == 0]
    passed = admitted[: admitted.index(large)]
    assert sum(each.blocks_for(5) for each in passed) == 40
    assert runs.state is SequenceState.FINISHED, "it fits only then"


def test_none_passes_that_needs_more_than_is_left_of_the_bound() -> None:
    scheduler = make_scheduler(num_blocks=12, max_batch_size=8)
    scheduler.add(make_sequence("runs", prompt(0, 16), max_tokens=12))
    run_step(scheduler)
    first = make_sequence("first", prompt(1, 36), max_tokens=1)
    scheduler.add(first)
    scheduler.add(make_sequence("other", prompt(2, 36), max_tokens=1))
    scheduler.add(make_sequence("little", prompt(3, 4), max_tokens=1))
    assert [chunk.sequence.request_id for chunk in run_step(scheduler).chunks] == ["little"]


def test_one_that_waits_again_may_be_passed_as_far_as_before() -> None:
    sequence, small = make_sequence("large", prompt(1, 16)), make_sequence("small", prompt(2, 4))
    blocked = Overtaking()
    blocked.block(sequence)
    for _ in range(sequence.blocks_for(16)):
        assert blocked.may_pass(small)
        blocked.passed(small)
    assert blocked.is_over
    Overtaking().passed(sequence)
    again = Overtaking()
    again.block(sequence)
    assert again.may_pass(small)


def test_each_sequence_that_waits_is_measured_once_a_step() -> None:
    """A step that finds many prompts without room for them looks at each of them, not at each
    pair."""
    measured: list[Sequence] = []

    def pages_for(sequence: Sequence, num_tokens: int) -> int:
        measured.append(sequence)
        return sequence.blocks_for(num_tokens)

    overtaking = Overtaking(pages_for)
    for number in range(MAX_TRIES):
        sequence = make_sequence(str(number), prompt(number))
        assert not overtaking.is_over
        assert overtaking.may_pass(sequence)
        overtaking.block(sequence)
    assert len(measured) <= 2 * MAX_TRIES


def test_remote_prompts_pass_too_once_their_source_has_begun() -> None:
    scheduler = make_scheduler(num_blocks=12, max_batch_size=8)
    scheduler.add(make_sequence("runs", prompt(0, 16), max_tokens=12))
    run_step(scheduler)
    scheduler.add(make_sequence("large", prompt(1, 36), remote=True, source_has_begun=True))
    small = make_sequence("small", prompt(2, 4), remote=True, source_has_begun=True)
    scheduler.add(small)
    assert run_step(scheduler).received == [small]
