"""Whose log is lost, and since when, from the counts that processes report."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from console.doctor.facts import LogFacts
from console.telemetry.facts.lost_logs import LogWatch
from process.logs import LogCounts
from tests.unit.router.router_harness import Harness, stats_of, until

NOTHING = LogCounts()


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.close()


def test_a_log_is_lost_from_the_first_lost_line_until_one_is_written() -> None:
    watch = LogWatch()
    for second, counts, since in (
        (1, LogCounts(10, 0), None),
        (2, LogCounts(10, 2), 2),
        (3, LogCounts(10, 2), 2),  # it says nothing: nobody knows better
        (4, LogCounts(11, 3), 2),
        (5, LogCounts(12, 3), None),
    ):
        watch.sample((), counts, second)
        found = [LogFacts(process="router", lost=counts.lost, since_us=since)] if since else []
        assert list(watch.facts()) == found


def test_lines_lost_before_the_first_counts_say_nothing_about_now() -> None:
    watch = LogWatch()
    watch.sample((), LogCounts(10, 2), 1)
    assert watch.facts() == ()
    watch.sample((), LogCounts(10, 3), 2)
    assert watch.facts() == (LogFacts(process="router", lost=3, since_us=2),)


async def test_workers_report_their_counts(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    await decode.subscribed()
    counters = {"log_lines": 0, "log_lines_lost": 1}
    decode.publish(msgspec.structs.replace(stats_of(decode, 0), counters=counters))
    await until(lambda: harness.fleet.worker("d1").stats is not None)
    watch = LogWatch()
    watch.sample(harness.fleet.workers(), NOTHING, 7)
    assert watch.facts() == (LogFacts(process="d1", lost=1, since_us=7),)
    watch.sample((), NOTHING, 8)
    assert watch.facts() == ()
