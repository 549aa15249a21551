"""Prometheus metrics of the router's work with the fleet.

The gateway and the console have metrics of their own. One object per registry, created once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from process.metrics.fast_metrics import LabelledCounts, PhaseHistograms, TokenHistogram
from router.routing.placement import Mode, Rule

_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip
_PHASES = {
    "tokenize_ms": ("baton_tokenize_seconds", "From a request's arrival until it is tokenised"),
    "placement_ms": (
        "baton_placement_seconds",
        "Admission, the wait for this router's turn, and the choice of workers",
    ),
    "dispatch_ms": ("baton_dispatch_seconds", "From the router until a worker read the request"),
    "queue_ms": ("baton_queue_seconds", "From a worker's receipt of a prompt to its first chunk"),
    "prefill_ms": ("baton_prefill_seconds", "From the start of the first chunk to the last's end"),
    "handoff_ms": ("baton_handoff_seconds", "From the last chunk's end to the first decode step"),
    "delivery_ms": (
        "baton_delivery_seconds",
        "From the router's receipt of the first token until it was written to the client",
    ),
    "first_step_ms": ("baton_first_decode_step_seconds", "The first decode step of an attempt"),
    "tpot_ms": (
        "baton_time_per_output_token_seconds",
        "Mean time between the tokens of one generation",
    ),
    "total_ms": ("baton_end_to_end_seconds", "From a request's arrival to its last token"),
    "decode_ms": ("baton_decode_seconds", "From the first token to the last, as the router saw"),
}


OUTCOMES = ("finished", "failed", "closed")
FAILURE_KINDS = ("connection_broke", "worker_lost", "no_room", "retryable", "final")
REFUSALS = (
    "overloaded", "deadline_unreachable", "target_unreachable", "prompt_too_long",
    "invalid_request", "failed", "other",
)  # fmt: skip
SOURCES = ("cached", "computed", "transferred", "computed_before")
RECORDED = ("written", "lost")
BAD_FRAMES = ("undecodable", "handshake", "no_hello", "foreign", "unexpected", "impossible")


class FleetMetrics:
    """Counters, gauges and histograms, as attributes. `before_reading` is called before each
    reading, for counts that are collected in batches."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.before_reading: Callable[[], None] = lambda: None
        self._registry = registry
        registry.register(_Reading(self))  # read first
        self._phases = PhaseHistograms(_PHASES, _SECONDS, registry)
        self.inflight = self._gauge("inflight", "Generations that have not ended")
        self.workers = self._gauge("workers", "Usable workers", "role")
        self.store_connected = self._gauge(
            "store_connected", "Whether the store of registrations answers"
        )
        self.store_certificate_end = self._gauge(
            "store_certificate_end_seconds",
            "When the store's certificate expires, as Unix time; NaN without TLS",
        )
        self.retries = self._counter("retries", "Attempts after a generation's first one")
        self.duplicates = self._counter(
            "duplicate_tokens", "Tokens that came again and were dropped"
        )
        self.stale = self._counter("stale_messages", "Messages of attempts that had ended")
        self.cache_gaps = self._counter("cache_gaps", "Gaps in workers' cache events")
        self.workers_lost = self._counter(
            "workers_lost", "Workers that left with or without notice"
        )
        self.blocks_moved = self._counter("blocks_moved", "KV blocks moved between workers")
        self.bytes_moved = self._counter("bytes_moved", "Bytes of KV moved between workers")
        self._add_labelled()
        self._add_histograms()

    def _add_labelled(self) -> None:
        self.attempts = self._by_label("attempts", "Attempts started", "mode", Mode)
        self.outcomes = self._by_label("generations", "Generations that ended", "outcome", OUTCOMES)
        self.failures = self._by_label(
            "attempt_failures", "Attempts that failed, by kind", "kind", FAILURE_KINDS
        )
        self.refusals = self._by_label(
            "refusals", "Generations refused before their first attempt", "reason", REFUSALS
        )
        self.refused = self._by_label(
            "refused_frames", "Frames from workers that were dropped", "reason", BAD_FRAMES
        )
        self.decisions = self._by_label(
            "decisions", "Attempts placed, by the rule that decided", "reason", Rule
        )
        self.recorded = self._by_label(
            "recorded_requests", "Requests for the recording, written or lost", "outcome", RECORDED
        )
        self.prompt_tokens = LabelledCounts(
            "baton_prompt_tokens_by_source",
            "Prompt tokens of ended generations: computed, found in a cache, and (of both) "
            "transferred to the decode worker; computed_before: computed by attempts that gave no "
            "token",
            "source",
            SOURCES,
            self._registry,
        )

    def _add_histograms(self) -> None:
        self.loop_lag = self._histogram(
            "router_event_loop_lag_seconds", "How late the router's event loop runs a timer"
        )
        self._predicted = self._histogram(
            "predicted_time_to_first_token_seconds",
            "Time to the first token of an attempt, predicted when it was placed",
        )
        self._prediction_error = self._histogram(
            "time_to_first_token_prediction_error_seconds",
            "How far the prediction was off, either way",
        )
        self._tpot_error = self._histogram(
            "time_per_output_token_prediction_error_seconds",
            "How far the prediction of a placement was off, either way",
        )

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"baton_router_{name}", text, labels, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"baton_router_{name}", text, registry=self._registry)

    def _by_label(self, name: str, text: str, label: str, values: Iterable[str]) -> LabelledCounts:
        return LabelledCounts(f"baton_router_{name}", text, label, values, self._registry)

    def _histogram(self, name: str, text: str) -> TokenHistogram:
        return TokenHistogram(f"baton_{name}", text, _SECONDS, self._registry)

    def observe_forecast(self, predicted_ms: float, took_ms: float) -> None:
        """Compare the predicted time to the first token with that of the attempt."""
        self._predicted.observe(predicted_ms / 1000)
        self._prediction_error.observe(abs(predicted_ms - took_ms) / 1000)

    def observe_tpot(self, predicted_ms: float, took_ms: float) -> None:
        """Compare the predicted time per output token with that of the attempt."""
        self._tpot_error.observe(abs(predicted_ms - took_ms) / 1000)

    def observe_durations(self, durations: Sequence[Mapping[str, float | None]]) -> None:
        """Observe the phases of generations that ended, in milliseconds; skip None."""
        self._phases.observe(durations)


class _Reading(Collector):
    """Calls `before_reading`; has no metrics of its own. A registry reads its collectors in the
    order of their registration."""

    def __init__(self, metrics: FleetMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """See the library's `Collector`."""
        self._metrics.before_reading()
        return ()
