"""The HTTP API's metrics: requests by endpoint and status, latencies, tokens.

Times are measured at the API, as clients experience them; workers report their own elsewhere.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from http_kit.door import Door
from process.metrics.fast_metrics import MAX_ASIDE, TokenCounter, TokenHistogram, buckets

CLIENT_GONE_STATUS = 499
"""The status that counts requests whose client left before the end."""

_LONG_S = (30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Requests may take `request_timeout_s`; its default lies among these."""
_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, *_LONG_S)
_BETWEEN_TOKENS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0, *_LONG_S,
)  # fmt: skip
_REQUEST_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, *_LONG_S)


class ApiMetrics:
    """The collectors of one registry, and the counts at the `door`. `clock` returns monotonic
    seconds."""

    def __init__(
        self,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.perf_counter,
        door: Door | None = None,
    ) -> None:
        self.clock = clock
        self.door = door or Door(clock)
        self._endpoints = _Endpoints(registry)
        self.ignored_fields = Counter(
            "baton_ignored_fields",
            "Fields of requests that were ignored and named in their answers' x-baton-ignored",
            registry=registry,
        )
        self.stream_errors = Counter(
            "baton_http_stream_errors",
            "Streams that ended with an error event after they had begun",
            registry=registry,
        )
        self.first_token = TokenHistogram(
            "baton_time_to_first_token_seconds",
            "Time from a request's arrival to the first token of each choice",
            _FIRST_TOKEN_S,
            registry,
        )
        self.between_tokens = TokenHistogram(
            "baton_inter_token_seconds",
            "Time between the tokens of a choice",
            _BETWEEN_TOKENS_S,
            registry,
        )
        self.prompt_tokens = TokenCounter(
            "baton_prompt_tokens",
            "Tokens of accepted prompts; a prompt counts once, however many choices it has",
            registry,
        )
        self.cached_tokens = TokenCounter(
            "baton_cached_prompt_tokens",
            "Tokens of accepted prompts that were not computed for the first token, because their "
            "KV was in a cache; a prompt counts once, however many choices it has",
            registry,
        )
        self.output_tokens = TokenCounter(
            "baton_output_tokens",
            "Generated tokens that reached the API",
            registry,
            more=lambda: self.between_tokens.count,  # tokens after first deltas
        )

    def endpoint(self, name: str) -> EndpointMetrics:
        """The metrics of one endpoint, which callers keep."""
        return self._endpoints.add(name)


class EndpointMetrics:
    """The requests of one endpoint, as plain numbers: every request updates them."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.by_status: dict[int, int] = {}
        self.counts = [0] * (len(_REQUEST_S) + 1)
        self.sum_s = 0.0

    def ended(self, status: int, seconds: float) -> None:
        """Count a request that was answered with this status."""
        self.by_status[status] = self.by_status.get(status, 0) + 1
        self.counts[bisect_left(_REQUEST_S, seconds)] += 1
        self.sum_s += seconds


class _Endpoints(Collector):
    """Exports the metrics of all endpoints."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._by_name: dict[str, EndpointMetrics] = {}
        registry.register(self)

    def add(self, name: str) -> EndpointMetrics:
        return self._by_name.setdefault(name, EndpointMetrics())

    def collect(self) -> Iterable[Metric]:
        """See the library's `Collector`."""
        requests = CounterMetricFamily(
            "baton_http_requests",
            "Finished HTTP requests; status 499: the client went away",
            labels=("endpoint", "status"),
        )
        in_flight = GaugeMetricFamily(
            "baton_http_requests_in_flight", "HTTP requests being answered", labels=("endpoint",)
        )
        duration = HistogramMetricFamily(
            "baton_http_request_seconds",
            "Time from a request's arrival to the end of its answer",
            labels=("endpoint",),
        )
        for name, shown in self._by_name.items():
            for status, count in shown.by_status.items():
                requests.add_metric((name, str(status)), count)
            in_flight.add_metric((name,), shown.in_flight)
            duration.add_metric((name,), buckets(_REQUEST_S, shown.counts), shown.sum_s)
        yield from (requests, in_flight, duration)


class LatencyProbe:
    """Observes the deltas of one choice of a request that arrived at `arrived` (by the metrics'
    clock). Of the choices of a prompt, one counts the prompt's cached tokens. Every token pays for
    it."""

    def __init__(self, metrics: ApiMetrics, arrived: float, counts_prompt: bool) -> None:
        self._metrics = metrics
        self._clock = metrics.clock
        self._aside = metrics.between_tokens.aside
        self._previous = arrived
        self._has_token = False
        self._counts_prompt = counts_prompt
        self._cached_tokens = 0

    def observe(self, num_tokens: int, cached_tokens: int) -> None:
        """Count tokens that just arrived; they share the time since the previous delta."""
        if cached_tokens > self._cached_tokens:
            self._count_cached(cached_tokens)
        if num_tokens == 0:
            return
        now = self._clock()
        elapsed = now - self._previous
        self._previous = now
        if self._has_token and num_tokens == 1:  # nearly every delta
            self._aside.append(elapsed)
            if len(self._aside) >= MAX_ASIDE:
                self._metrics.between_tokens.sort_in()
        elif self._has_token:
            self._metrics.between_tokens.observe(elapsed / num_tokens, num_tokens)
        else:
            self._metrics.output_tokens.value += num_tokens
            self._metrics.first_token.observe(elapsed)
            self._has_token = True

    def _count_cached(self, cached_tokens: int) -> None:
        if self._counts_prompt:
            self._metrics.cached_tokens.value += cached_tokens - self._cached_tokens
        self._cached_tokens = cached_tokens
