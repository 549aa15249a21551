"""Prometheus metrics of the router's work with the fleet.

The metrics of the HTTP side live with the API. One object per registry, created once.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from router.fast_metrics import CountersByLabel, TokenHistogram

_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
_PHASES = {
    "queue_ms": ("baton_queue_seconds", "From a worker's receipt of a prompt to its first chunk"),
    "prefill_ms": ("baton_prefill_seconds", "From the start of the first chunk to the last's end"),
    "handoff_ms": ("baton_handoff_seconds", "From the last chunk's end to the first decode step"),
    "decode_ms": ("baton_decode_seconds", "From the first token to the last, as the router saw"),
}


class FleetMetrics:
    """Counters, gauges and histograms; each is an attribute."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"baton_router_{name}", text, labels, registry=registry)

        self.inflight = Gauge(
            "baton_router_inflight", "Generations that have not ended", registry=registry
        )
        self.workers = Gauge("baton_router_workers", "Usable workers", ("role",), registry=registry)
        self.attempts = CountersByLabel(counter("attempts", "Attempts started", "mode"))
        self.retries = counter("retries", "Attempts after a generation's first one")
        self.outcomes = CountersByLabel(counter("generations", "Generations that ended", "outcome"))
        self.duplicates = counter("duplicate_tokens", "Tokens that came again and were dropped")
        self.stale = counter("stale_messages", "Messages of attempts that had ended")
        self.refused = counter("refused_frames", "Frames from workers that were dropped", "reason")
        self.cache_gaps = counter("cache_gaps", "Gaps in workers' cache events")
        self.workers_lost = counter("workers_lost", "Workers that left with or without notice")
        self.blocks_moved = counter("blocks_moved", "KV blocks moved between workers")
        self.bytes_moved = counter("bytes_moved", "Bytes of KV moved between workers")
        self._phases = {
            key: TokenHistogram(name, text, _SECONDS, registry)
            for key, (name, text) in _PHASES.items()
        }

    def observe_durations(self, durations: Mapping[str, float | None]) -> None:
        """Observe the phases of a generation that ended, in milliseconds; skip None."""
        for key, histogram in self._phases.items():
            value = durations[key]
            if value is not None:
                histogram.observe(value / 1000)
