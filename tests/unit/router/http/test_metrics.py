"""The metrics of endpoints, as a registry exports them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from router.http.metrics import ApiMetrics


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
