"""A worker's load and counters for Prometheus, read from its latest load report.

Each report replaces the last as a whole, so the metrics thread never reads half a report. Times
are reported in microseconds and shown in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from protocol.events import WorkerStats
from protocol.messages import Role
from worker.counters import MEANINGS, Count

_US = "_us"
_GAUGES = {
    "num_waiting": "Sequences without KV blocks",
    "num_running": "Sequences with KV blocks: receiving, fetching, prefilling, decoding",
    "queued_tokens": "Tokens still to be prefilled here",
    "blocks_total": "KV blocks in the pool",
    "blocks_used": "KV blocks in use (pinned): running, granted, being read",
    "blocks_cached": "KV blocks that hold a prefix others can use",
    "blocks_retained": "Cached KV blocks that clients' hints protect from eviction",
    "blocks_waiting": "KV blocks that waiting sequences will need",
    "blocks_granted": "Used KV blocks that peers are writing for requests that will run",
    "blocks_fenced": "Used KV blocks of ended requests that peers may still write to",
    "blocks_serving": "KV blocks of the cache that other workers read now",
    "blocks_stuck": "Fenced KV blocks whose peer has fallen silent",
    "host_tier_bytes": "Bytes of KV blocks that host memory below the pool may hold",
    "host_tier_used_bytes": "Bytes of KV blocks that it holds",
    "disk_tier_bytes": "Bytes of KV blocks that the disk below the pool may hold",
    "disk_tier_used_bytes": "Bytes of KV blocks that it holds",
    "num_handoffs": "Handoffs that have not closed",
    "prefill_unreachable": "1: this decode worker reaches no prefill worker and computes prompts",
    "step_fixed_us": "Fitted step time: seconds per step",
    "step_per_token_us": "Fitted step time: seconds per token",
    "step_per_attended_us": "Fitted step time: seconds per attended (query, key) pair",
}


_RANK_COUNTERS = {
    "rank_busy_us": "Time for which a rank has computed layers; stages and ranks count from 0",
    "rank_wait_us": "Time for which a rank has waited for others in the midst of steps",
}


class WorkerMetrics(Collector):
    """`baton_worker_*`, labelled with the worker and its role. `latest` returns the last report;
    `tp_size`: the ranks of each stage, which have labels, too, if there are several."""

    def __init__(
        self, role: Role, worker_id: str, latest: Callable[[], WorkerStats], tp_size: int = 1
    ) -> None:
        self._labels = {"role": role.value, "worker": worker_id}
        self._latest = latest
        self._tp_size = tp_size

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The families, each with one sample."""
        stats = self._latest()
        free = stats.blocks_total - stats.blocks_used - stats.blocks_cached
        yield self._gauge("blocks_free", "KV blocks that hold nothing", free)
        for name, text in _GAUGES.items():
            yield self._gauge(name, text, getattr(stats, name))
        for name, value in sorted(stats.counters.items()):
            shown, scaled = _in_seconds(name, value)
            text = MEANINGS[Count(name)]
            counter = CounterMetricFamily(f"baton_worker_{shown}", text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), scaled)
            yield counter
        for name, text in _RANK_COUNTERS.items():
            if times := getattr(stats, name):
                yield self._by_rank(name, text, times)

    def _by_rank(self, name: str, text: str, times: Sequence[int]) -> CounterMetricFamily:
        shown, _ = _in_seconds(name, 0.0)
        labels = [*self._labels, "stage", "rank"]
        counter = CounterMetricFamily(f"baton_worker_{shown}", text, labels=labels)
        last_stage = len(times) // self._tp_size - 1
        for number, time_us in enumerate(times):
            stages_after, rank = divmod(number, self._tp_size)
            place = [str(last_stage - stages_after), str(rank)]
            counter.add_metric([*self._labels.values(), *place], time_us / 1e6)
        return counter

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        shown, scaled = _in_seconds(name, value)
        gauge = GaugeMetricFamily(f"baton_worker_{shown}", text, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), scaled)
        return gauge


def _in_seconds(name: str, value: float) -> tuple[str, float]:
    """The name and the value by Prometheus's conventions."""
    if name.endswith(_US):
        return f"{name.removesuffix(_US)}_seconds", value / 1e6
    return name, float(value)
