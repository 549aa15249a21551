"""Metrics of tokens look like the library's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from router.fast_metrics import TokenCounter, TokenHistogram

BOUNDS = (0.001, 0.5, 2.0)


def shown(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def test_they_show_what_the_librarys_own_would() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = TokenHistogram("pauses", "Pauses", BOUNDS, ours)
    same = Histogram("pauses", "Pauses", buckets=BOUNDS, registry=theirs)
    counter, same_counter = TokenCounter("n", "N", ours), Counter("n", "N", registry=theirs)
    assert shown(ours) == shown(theirs)
    for value in (0.0005, 0.001, 0.4, 0.5, 3.0):
        histogram.observe(value, 2)
        counter.value += 1
        for _ in range(2):
            same.observe(value)
        same_counter.inc()
    assert shown(ours) == shown(theirs)
