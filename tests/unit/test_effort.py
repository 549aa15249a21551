"""Everyday runs try a part of the cases, of which none is always left out by accident."""

from __future__ import annotations

import itertools

import pytest

from tests import effort


@pytest.fixture(autouse=True)
def everyday(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "NIGHTLY", False)


def test_some_values_are_spread_with_the_first_and_the_last() -> None:
    assert effort.some(range(101), 5) == [0, 25, 50, 75, 100]
    assert effort.some("abc", 2) == ["a", "c"]
    assert effort.some("abc", 1) == ["a"]
    assert effort.some("ab", 3) == ["a", "b"]


def test_each_value_comes_in_turn() -> None:
    assert effort.in_turn("abc", [1, 2]) == [("a", 1), ("b", 2), ("c", 1)]
    assert effort.in_turn("a", [1, 2]) == [("a", 1), ("a", 2)]


def test_every_pair_of_values_occurs() -> None:
    values = ("abc", [1, 2], [True, False])
    rows = effort.pairwise("x, y, z", *values).args[1]
    assert len(rows) < 12
    for one, other in itertools.combinations(range(3), 2):
        wanted = set(itertools.product(values[one], values[other]))
        assert {(row[one], row[other]) for row in rows} == wanted


def test_at_night_everything_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "NIGHTLY", True)
    assert effort.some(range(101), 5) == [*range(101)]
    assert len(effort.in_turn("abc", [1, 2])) == 6
    assert len(effort.pairwise("x, y, z", "abc", [1, 2], [True, False]).args[1]) == 12
    assert effort.times(2, 50) == 50
