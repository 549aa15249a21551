"""Metrics of tokens look like the library's own."""

from __future__ import annotations

from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from gateway.metrics import ApiMetrics
from process.metrics.fast_metrics import MAX_ASIDE, PhaseHistograms, TokenCounter, TokenHistogram
from router.metrics import FleetMetrics
from router_process.settings import RouterSettings

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


def test_values_are_put_aside_until_they_are_many_or_read() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = TokenHistogram("pauses", "Pauses", BOUNDS, ours)
    same = Histogram("pauses", "Pauses", buckets=BOUNDS, registry=theirs)
    values = [0.25 * (place % 11) for place in range(MAX_ASIDE + 3)]
    for number, value in enumerate(values, start=1):
        histogram.observe(value)
        same.observe(value)
        assert histogram.count == number
        assert len(histogram.aside) == number % MAX_ASIDE
    assert shown(ours) == shown(theirs)
    assert histogram.aside == []


def test_phases_of_many_requests_are_observed_at_once() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    names = {"queue_ms": ("queue", "Queue"), "decode_ms": ("decode", "Decode")}
    phases = PhaseHistograms(names, BOUNDS, ours)
    same = {
        key: Histogram(name, text, buckets=BOUNDS, registry=theirs)
        for key, (name, text) in names.items()
    }
    assert shown(ours) == shown(theirs)
    for size in (1, 0, 40):
        durations = [
            {"queue_ms": 250.0 * (place % 11), "decode_ms": None if place % 2 else 500.0}
            for place in range(size)
        ]
        phases.observe(durations)
        for each in durations:
            for key, value in each.items():
                if value is not None:
                    same[key].observe(value / 1000)
        assert shown(ours) == shown(theirs)


def test_histograms_of_latency_reach_as_far_as_a_request_may_take() -> None:
    registry = CollectorRegistry()
    FleetMetrics(registry)
    ApiMetrics(registry).endpoint("x")
    longest = next(e for e in fields(RouterSettings) if e.name == "request_timeout_s").default
    found: dict[str, float] = {}
    for family in registry.collect():
        bounds = {each.labels["le"] for each in family.samples if each.name.endswith("_bucket")}
        if bounds:
            found[family.name] = max(float(each) for each in bounds - {"+Inf"})
    assert len(found) == 18
    assert all(last > longest for last in found.values()), found
