"""What is measured of a pair of workers, and how it is forgotten."""

from __future__ import annotations

import pytest

from worker.inbound.fetch_rates import CONNECT_S, MAX_PAIRS, TURN_S, FetchPairs, usual_speed


def test_an_unknown_pair_has_the_usual_costs_and_must_connect() -> None:
    cost = FetchPairs(4e9).cost("p", now=0)
    assert (cost.turn_s, cost.bytes_per_s, cost.found_share) == (TURN_S, 4e9, 1.0)
    assert cost.connect_s == CONNECT_S


def test_the_first_fetch_connects_and_says_nothing_about_turns() -> None:
    pairs = FetchPairs(4e9)
    pairs.note_turn("p", 0.4, now=0)
    cost = pairs.cost("p", now=0)
    assert (cost.turn_s, cost.connect_s) == (TURN_S, 0.0)
    pairs.note_turn("p", 0.105, now=0)
    assert pairs.cost("p", now=0).turn_s == pytest.approx(TURN_S + 0.3 * 0.1)


def test_stale_hints_and_slow_links_fade_in_and_out_again() -> None:
    pairs = FetchPairs(4e9)
    for _ in range(20):
        pairs.note_found("p", 0, 10, now=0)
        pairs.note_speed("p", 10**6, 1e-2, now=0)
    now = pairs.cost("p", now=0)
    assert now.found_share < 0.01
    assert now.bytes_per_s == pytest.approx(1e8, rel=0.01)
    later = pairs.cost("p", now=600)
    assert later.found_share > 0.99
    assert later.bytes_per_s == pytest.approx(4e9, rel=0.01)


def test_pairs_of_workers_that_are_gone_do_not_pile_up() -> None:
    pairs = FetchPairs(4e9)
    for number in range(MAX_PAIRS + 5):
        pairs.note_turn(f"p{number}", 0.1, now=0)
    assert pairs.cost("p0", now=0).connect_s == CONNECT_S
    assert pairs.cost(f"p{MAX_PAIRS}", now=0).connect_s == 0.0


@pytest.mark.parametrize(
    ("paths", "speed"),
    [
        ("shm", 4e9),
        ("nixl CMA", 4e9),
        ("nixl RDMA", 10e9),
        ("nixl TCP", 1e9),
        ("nixl RDMA TCP", 10e9),
    ],
)
def test_the_path_says_what_speed_to_expect(paths: str, speed: float) -> None:
    assert usual_speed(paths) == speed
