"""Which tiers fail, and since when, from the counts that workers report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from console.doctor.facts import TierFacts
from console.telemetry.facts.failing_tiers import FAILS_FOR_US, TierWatch


def worker(failures: int, incarnation: str = "i") -> Any:
    counters = {"disk_tier_failures": failures}
    info, stats = SimpleNamespace(incarnation=incarnation), SimpleNamespace(counters=counters)
    return SimpleNamespace(worker_id="d1", info=info, stats=stats)


def test_a_tier_fails_from_its_first_failure_until_a_minute_without() -> None:
    watch = TierWatch()
    late = 9 + FAILS_FOR_US
    for now_us, total, expected in (
        (1, 3, None),  # what was before this router looked is over
        (5, 4, (1, 5)),
        (9, 7, (4, 5)),
        (late - 1, 7, (4, 5)),
        (late, 7, None),
        (late + 1, 8, (1, late + 1)),
    ):
        watch.sample([worker(total)], now_us)
        found = [(each.failures, each.since_us) for each in watch.facts()]
        assert found == ([] if expected is None else [expected])
    assert watch.facts() == (TierFacts(worker_id="d1", tier="disk", failures=1, since_us=late + 1),)
    watch.sample([worker(0, "another")], late + 2)
    assert watch.facts() == ()
