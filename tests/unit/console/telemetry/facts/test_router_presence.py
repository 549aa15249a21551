"""Which other routers tell of themselves: lost, hung, left in order, replaced."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from console.telemetry.facts.router_presence import KEPT_US, SILENT_AFTER_S, RouterPresence


class Board:
    """Routers on a clock of one exchange per two seconds."""

    def __init__(self) -> None:
        self.now_us = 1_000_000
        self.presence = RouterPresence(lambda: self.now_us)
        self._words: Iterator[int] = itertools.count()
        self._last: dict[str, bytes] = {}

    def exchange(self, *speaking: str, silent: tuple[str, ...] = ()) -> None:
        self.now_us += 2_000_000
        self._last |= {each: b"%d" % next(self._words) for each in speaking}
        self.presence.take({each: self._last[each] for each in (*speaking, *silent)})

    def missed(self) -> list[str]:
        return [each.name for each in self.presence.missed()]


@pytest.fixture
def board() -> Board:
    return Board()


def test_a_router_whose_summary_stays_the_same_is_missed_within_ten_seconds(board: Board) -> None:
    board.exchange("a", "b")
    board.presence.names["a"] = "router-a (host, pid 1)"
    since_us = board.now_us
    while not board.missed():
        board.exchange("b", silent=("a",))
        assert board.now_us - since_us <= 8_000_000
    assert board.now_us - since_us >= SILENT_AFTER_S * 1e6
    (missed,) = board.presence.missed()
    assert (missed.name, missed.since_us) == ("router-a (host, pid 1)", since_us)
    assert board.presence.serving() == ["router b"]
    board.exchange("b")
    assert board.missed() == ["router-a (host, pid 1)"], "also when its summary has expired"
    board.exchange("a", "b")
    assert board.missed() == ["router-a (host, pid 1)"], "it is known again, and not heard yet"
    board.exchange("a", "b")
    assert board.missed() == []


def test_a_router_that_takes_its_summary_away_is_not_missed(board: Board) -> None:
    board.exchange("a", "b")
    for _ in range(10):
        board.exchange("b")
    assert board.missed() == []


def test_a_later_router_takes_the_place_of_a_lost_one(board: Board) -> None:
    board.exchange("a", "b")
    for _ in range(5):
        board.exchange("b", silent=("a",))
    assert board.missed() == ["router a"]
    board.exchange("b", "c")
    assert board.missed() == []


def test_nobody_is_missed_because_the_store_was_away(board: Board) -> None:
    board.exchange("a", "b")
    for _ in range(10):
        board.exchange()
    board.exchange("a", "b")
    board.exchange("a", "b")
    assert board.missed() == []


def test_a_lost_router_is_forgotten_after_an_hour(board: Board) -> None:
    board.exchange("a")
    for _ in range(5):
        board.exchange(silent=("a",))
    board.exchange()
    board.now_us += KEPT_US
    board.exchange()
    assert (board.missed(), board.presence.names) == ([], {})
