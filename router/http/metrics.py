"""The HTTP API's metrics: requests by endpoint and status, latencies, tokens.

Times are measured at the API, as clients experience them; workers report their own elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.fast_metrics import TokenCounter, TokenHistogram

CLIENT_GONE_STATUS = 499
"""The status that counts requests whose client left before the end."""

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
_REQUEST_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class ApiMetrics:
    """The collectors of one registry. `clock` returns monotonic seconds."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.clock = clock
        self.requests = Counter(
            "baton_http_requests",
            "Finished HTTP requests; status 499: the client went away",
            ["endpoint", "status"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "baton_http_requests_in_flight",
            "HTTP requests being answered",
            ["endpoint"],
            registry=registry,
        )
        self.stream_errors = Counter(
            "baton_http_stream_errors",
            "Streams that ended with an error event after they had begun",
            registry=registry,
        )
        self.duration = Histogram(
            "baton_http_request_seconds",
            "Time from a request's arrival to the end of its answer",
            ["endpoint"],
            buckets=_REQUEST_S,
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
        self.prompt_tokens = Counter(
            "baton_prompt_tokens", "Tokens of accepted prompts", registry=registry
        )
        self.cached_tokens = Counter(
            "baton_cached_prompt_tokens",
            "Prompt tokens whose KV was found in a cache, over all choices",
            registry=registry,
        )
        self.output_tokens = TokenCounter(
            "baton_output_tokens", "Generated tokens that reached the API", registry
        )

    def probe(self, arrived: float) -> LatencyProbe:
        """A probe for one choice of a request that arrived at `arrived` (by `clock`)."""
        return LatencyProbe(self, arrived)


class LatencyProbe:
    """Observes the deltas of one choice."""

    def __init__(self, metrics: ApiMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._previous = arrived
        self._has_token = False
        self._cached_tokens = 0

    def observe(self, num_tokens: int, cached_tokens: int) -> None:
        """Count tokens that just arrived; they share the time since the previous delta."""
        if cached_tokens > self._cached_tokens:
            self._metrics.cached_tokens.inc(cached_tokens - self._cached_tokens)
            self._cached_tokens = cached_tokens
        if num_tokens == 0:
            return
        now = self._metrics.clock()
        elapsed = now - self._previous
        self._previous = now
        self._metrics.output_tokens.value += num_tokens
        if self._has_token:
            self._metrics.between_tokens.observe(elapsed / num_tokens, num_tokens)
        else:
            self._metrics.first_token.observe(elapsed)
            self._has_token = True
