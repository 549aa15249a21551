"""A worker's load and counters for Prometheus, read from its latest load report.

Each report replaces the last as a whole, so the metrics thread never reads half a report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from protocol.events import WorkerStats
from protocol.messages import Role

_GAUGES = {
    "num_waiting": "Sequences without KV blocks",
    "num_running": "Sequences with KV blocks: receiving, prefilling, decoding",
    "queued_tokens": "Tokens still to be prefilled here",
    "blocks_total": "KV blocks in the pool",
    "blocks_used": "KV blocks in use: running, granted, being read",
    "blocks_cached": "KV blocks that hold a prefix others can use",
    "num_handoffs": "Handoffs that have not closed",
    "step_fixed_us": "Fitted step time: microseconds per step",
    "step_per_token_us": "Fitted step time: microseconds per token",
    "step_per_attended_us": "Fitted step time: microseconds per attended (query, key) pair",
}


class WorkerMetrics(Collector):
    """`baton_worker_*`, labelled with the worker and its role. `latest` gives the last report."""

    def __init__(self, role: Role, worker_id: str, latest: Callable[[], WorkerStats]) -> None:
        self._labels = {"role": role.value, "worker": worker_id}
        self._latest = latest

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The families, each with one sample."""
        stats = self._latest()
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"baton_worker_{name}", text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), float(getattr(stats, name)))
            yield gauge
        for name, value in sorted(stats.counters.items()):
            text = f"{name.replace('_', ' ').capitalize()} since the worker started"
            counter = CounterMetricFamily(f"baton_worker_{name}", text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
