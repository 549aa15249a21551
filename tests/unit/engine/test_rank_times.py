"""What a rank computes and waits for in a step is counted apart, for all ranks in one table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine import rank_times
from engine.rank_times import LINE_NUMBERS, RankTime, RankTimes


def test_waits_are_no_work_and_each_rank_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=5_000)
    monkeypatch.setattr(rank_times, "perf_counter_ns", lambda: clock.now)
    table = memoryview(bytearray(2 * LINE_NUMBERS * 8)).cast("q")
    head, hand = RankTimes(table, 0), RankTimes(table, 1)
    sums, link = SimpleNamespace(waited_ns=1_000), SimpleNamespace(waited_ns=0)
    for _ in range(2):
        with hand.timed(sums, None, link):
            clock.now += 90_000
            sums.waited_ns += 20_000
            link.waited_ns += 10_000
    with head.timed(None):
        clock.now += 7_000
    assert head.totals() == hand.totals() == [RankTime(7, 0), RankTime(120, 60)]
