"""For how long each rank of an engine has computed and waited; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

_BUSY, _WAITED, LINE_NUMBERS = 0, 1, 8


@dataclass(frozen=True)
class RankTime:
    """The time that a rank has computed layers, and that it has waited for others meanwhile."""

    busy_us: int
    wait_us: int


class Waits(Protocol):
    """An object that counts how long it has waited."""

    @property
    def waited_ns(self) -> int:
        """The time waited so far."""


class RankTimes:
    """The table of all ranks' times, of which rank `number` writes its own line. `table` has
    `LINE_NUMBERS` numbers for each rank, as "q", and is zeroed before the first rank begins."""

    def __init__(self, table: memoryview, number: int) -> None:
        self._table = table
        self._first = number * LINE_NUMBERS

    @contextmanager
    def timed(self, *waits: Waits | None) -> Iterator[None]:
        """Count the time of a pass; the growth of `waits` counts as waiting, not computing."""
        parts = [each for each in waits if each is not None]
        waited, started = sum(each.waited_ns for each in parts), perf_counter_ns()
        yield
        waited = sum(each.waited_ns for each in parts) - waited
        self._table[self._first + _BUSY] += perf_counter_ns() - started - waited
        self._table[self._first + _WAITED] += waited

    def lines(self, numbers: range) -> list[int]:
        """The lines of some ranks, one after the other, for `note` on another host."""
        table = self._table[numbers.start * LINE_NUMBERS : numbers.stop * LINE_NUMBERS]
        return table.tolist()

    def note(self, first: int, lines: Sequence[int]) -> None:
        """Note the lines of ranks on another host, from number `first` on."""
        for index, value in enumerate(lines[: len(self._table) - first * LINE_NUMBERS]):
            self._table[first * LINE_NUMBERS + index] = value

    def totals(self) -> list[RankTime]:
        """The times of all ranks, by their numbers."""
        table = self._table
        return [
            RankTime(table[first + _BUSY] // 1000, table[first + _WAITED] // 1000)
            for first in range(0, len(table), LINE_NUMBERS)
        ]
