"""A worker's clock against ours, from round trips of any shape."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.clock_offset import WINDOW, ClockOffset

LEGS = st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 50_000)), min_size=1, max_size=40)


@given(LEGS, st.integers(-(10**9), 10**9))
def test_the_true_offset_is_within_the_error(legs: list[tuple[int, int]], true_us: int) -> None:
    clock, now = ClockOffset(), 10**15
    for out, back in legs:
        clock.observe(now, now + out + true_us, now + out + back)
        now += 1_000_000
    assert clock.reading is not None
    offset_us, error_us = clock.reading
    assert abs(offset_us - true_us) <= error_us
    best_out = min(out for out, _ in legs[-WINDOW:])
    best_back = min(back for _, back in legs[-WINDOW:])
    width = best_out + best_back
    assert error_us <= (width if offset_us == 0 else (width + 1) // 2)


def test_clocks_that_may_be_equal_count_as_equal() -> None:
    """The first ping waits in a worker that is just starting; the middle would be 90 ms off."""
    clock = ClockOffset()
    clock.observe(1_000_000, 1_199_000, 1_200_000)
    assert clock.reading == (0, 199_000)
    clock.observe(2_000_000, 2_000_300, 2_000_400)
    assert clock.reading == (0, 300)


def test_a_clock_that_was_set_is_measured_again() -> None:
    clock = ClockOffset()
    clock.observe(1_000_000, 1_000_100, 1_000_200)
    assert clock.reading == (0, 100)
    clock.observe(2_000_000, 7_000_100, 2_000_200)
    assert clock.reading == (5_000_000, 100)


def test_a_round_trip_that_ends_before_it_began_tells_nothing() -> None:
    clock = ClockOffset()
    clock.observe(2_000, 1_500, 1_000)
    assert clock.reading is None
    assert clock.offset_us == 0
