"""The fleet's sums for Prometheus: pressure, goodput, targets, and transfers by pair.

Label values are bounded: two sides, and the ids of at most `MAX_PAIRS` pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.telemetry.report import FleetReport

_PAIR_COUNTERS = (
    ("baton_pair_bytes", "Bytes of KV moved by a pair of workers"),
    ("baton_pair_blocks", "KV blocks moved by a pair of workers"),
    ("baton_pair_descriptors", "Writes posted for a pair of workers"),
    ("baton_pair_transfer_seconds", "Time in which a pair had a write under way"),
    ("baton_pair_exposed_seconds", "Time that a pair's blocks moved after the last chunk"),
    ("baton_pair_failures", "Attempts over a pair that failed before their blocks had moved"),
)


class FleetCollector(Collector):
    """`baton_fleet_*` and `baton_pair_*` of one router."""

    def __init__(self, report: FleetReport) -> None:
        self._report = report

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """See the library's `Collector`."""
        now = self._report.gauges()
        text = "Predicted load as a share of its target, by side; 1: at the target"
        pressure = GaugeMetricFamily("baton_fleet_pressure", text, labels=["side"])
        for side, value in (("prefill", now.prefill_pressure), ("decode", now.decode_pressure)):
            if value is not None:
                pressure.add_metric([side], value)
        yield pressure
        for name, text, value in (
            ("goodput_ratio", "Share of the last minute's requests that met both targets",
             now.goodput),
            ("goodput_target_ratio", "Target of the goodput", now.goodput_target),
            ("ttft_target_seconds", "Target of the time to the first token",
             now.ttft_target_ms / 1000),
            ("tpot_target_seconds", "Target of the time per output token",
             _seconds(now.tpot_target_ms)),
            ("predicted_step_seconds", "Predicted decode step, over all decode workers",
             _seconds(now.predicted_step_ms)),
            ("slow_pairs", "Pairs of workers whose KV took a worse way in the last minute than "
             "both have, or moved slower than its way gives", now.slow_pairs),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(f"baton_fleet_{name}", text)
            if value is not None:
                gauge.add_metric([], value)
            yield gauge
        yield from self._pairs()

    def _pairs(self) -> Iterator[CounterMetricFamily]:
        totals = list(self._report.pairs.totals())
        for place, (name, text) in enumerate(_PAIR_COUNTERS):
            family = CounterMetricFamily(name, text, labels=["source", "target"])
            for key, sums in totals:
                family.add_metric(key, sums[place])
            yield family


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000
