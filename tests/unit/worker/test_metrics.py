"""A worker's reports as Prometheus reads them, over HTTP."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from process.metrics import process_registry, start_metrics_server
from protocol.events import WorkerStats
from protocol.messages import Role
from worker.metrics import WorkerMetrics


def test_gauges_and_counters_of_the_latest_report() -> None:
    stats = WorkerStats(
        worker_id="d",
        incarnation="i",
        num_waiting=2,
        num_running=3,
        queued_tokens=40,
        blocks_total=100,
        blocks_used=7,
        blocks_cached=9,
        counters={"handoffs": 5},
    )
    registry = process_registry()
    registry.register(WorkerMetrics(Role.DECODE, "d", lambda: stats))
    server = start_metrics_server(0, "127.0.0.1", registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        server.close()
    samples = {
        sample.name: sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["baton_worker_num_waiting"].value == 2
    assert samples["baton_worker_blocks_used"].value == 7
    assert samples["baton_worker_handoffs_total"].value == 5
    assert samples["baton_worker_handoffs_total"].labels == {"role": "decode", "worker": "d"}
    assert "process_resident_memory_bytes" in samples
