"""How much of the time of a waiting request is left to it by more urgent ones."""

from __future__ import annotations

import pytest

from router.routing.urgent_work import HALF_LIFE, MOST_SHARES, UrgentWork


def test_more_urgent_work_of_the_same_share_leaves_less() -> None:
    work = UrgentWork()
    for priority in (0, -1, -2):
        work.note("a", priority, 1000)
    left = [work.left_for("a", priority) for priority in (1, 0, -1, -2, -3)]
    assert left == pytest.approx([1.0, 1.0, 1 / (1 + 1 / 9), 1 / (1 + 4 / 9), 1 / 2])
    assert work.left_for("b", -3) == 1.0, "each share has its turns"


def test_work_is_forgotten_by_requests_of_its_share() -> None:
    work = UrgentWork()
    work.note("a", 0, 1000)
    for _ in range(12 * HALF_LIFE):
        work.note("b", -1, 1000)
    assert work.left_for("a", -1) == 0.5
    for _ in range(12 * HALF_LIFE):
        work.note("a", -1, 1000)
    assert work.left_for("a", -1) == 1.0


def test_shares_are_forgotten_that_were_longest_without_a_request() -> None:
    work = UrgentWork()
    for number in range(MOST_SHARES):
        work.note(f"s{number}", 0, 1)
    work.note("s0", 0, 1)
    work.note("new", 0, 1)
    assert len(work) == MOST_SHARES
    assert [work.left_for(name, -1) for name in ("s0", "s1")] == [0.5, 1.0]
