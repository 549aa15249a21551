"""The metrics of endpoints, as a registry exports them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.metrics import ApiMetrics, LatencyProbe
from process.metrics.fast_metrics import MAX_ASIDE


def test_an_endpoint_counts_its_requests_by_status_and_by_time() -> None:
    registry = CollectorRegistry()
    metrics = ApiMetrics(registry)
    endpoint = metrics.endpoint("/v1/models")
    for status, seconds in ((200, 0.04), (200, 0.05), (404, 0.06), (200, 7000.0)):
        endpoint.ended(status, seconds)
    assert metrics.endpoint("/v1/models") is endpoint

    def shown(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"baton_http_{name}", {"endpoint": "/v1/models"} | labels)

    assert shown("requests_total", status="200") == 3
    assert shown("requests_total", status="404") == 1
    assert shown("request_seconds_count") == 4
    assert shown("request_seconds_sum") == 0.04 + 0.05 + 0.06 + 7000.0
    buckets = [shown("request_seconds_bucket", le=le) for le in ("0.01", "0.05", "0.1", "1800.0")]
    assert buckets == [0, 2, 3, 3]
    assert shown("request_seconds_bucket", le="+Inf") == 4


def test_the_tokens_of_a_choice_are_counted_and_timed() -> None:
    now, registry = 10.0, CollectorRegistry()
    metrics = ApiMetrics(registry, lambda: now)
    probe, other = LatencyProbe(metrics, now, True), LatencyProbe(metrics, now, False)
    for seconds, num_tokens, cached in (
        (0.5, 0, 0), (1.5, 2, 16), (0.25, 1, 16), (0.5, 2, 16), (0.25, 1, 48), (0.5, 0, 48),
    ):  # fmt: skip
        now += seconds
        probe.observe(num_tokens, cached)
        other.observe(num_tokens, cached)
    counts = {
        name: registry.get_sample_value(f"baton_{name}")
        for name in (
            "time_to_first_token_seconds_count", "time_to_first_token_seconds_sum",
            "inter_token_seconds_count", "inter_token_seconds_sum", "output_tokens_total",
            "cached_prompt_tokens_total",
        )
    }  # fmt: skip
    assert list(counts.values()) == [2, 4.0, 8, 2.0, 12, 48]
    in_bucket = registry.get_sample_value("baton_inter_token_seconds_bucket", {"le": "0.25"})
    assert in_bucket == 8, "tokens of one delta share the time since the one before"


def test_many_tokens_are_not_put_aside_for_ever() -> None:
    now, registry = 0.0, CollectorRegistry()
    metrics = ApiMetrics(registry, lambda: now)
    probe = LatencyProbe(metrics, now, True)
    for _ in range(3 * MAX_ASIDE):
        now += 0.5
        probe.observe(1, 0)
        assert len(metrics.between_tokens.aside) < MAX_ASIDE
    assert registry.get_sample_value("baton_output_tokens_total") == 3 * MAX_ASIDE
    assert registry.get_sample_value("baton_inter_token_seconds_count") == 3 * MAX_ASIDE - 1
