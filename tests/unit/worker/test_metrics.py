"""A worker's reports as Prometheus reads them, over HTTP."""

from __future__ import annotations

import logging
import urllib.request
from contextlib import ExitStack
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from process.metrics.metrics_server import process_registry, start_metrics_server
from protocol.events import WorkerStats
from protocol.messages import Role
from worker.metrics import WorkerMetrics
from worker.probes import WorkerProbes, serve_probes

STATS = WorkerStats(
    worker_id="d",
    incarnation="i",
    num_waiting=2,
    num_running=3,
    queued_tokens=40,
    blocks_total=100,
    blocks_used=7,
    blocks_cached=9,
    counters={"handoffs": 5, "step_us": 2_500_000},
    blocks_granted=3,
    step_fixed_us=1500.0,
)


def test_gauges_and_counters_of_the_latest_report() -> None:
    registry = process_registry()
    registry.register(WorkerMetrics(Role.DECODE, "d", lambda: STATS))
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
    assert samples["baton_worker_step_seconds_total"].value == 2.5
    assert samples["baton_worker_step_fixed_seconds"].value == 0.0015
    assert samples["baton_worker_blocks_free"].value == 84
    assert samples["baton_worker_blocks_granted"].value == 3
    assert samples["baton_worker_handoffs_total"].labels == {"role": "decode", "worker": "d"}
    assert "process_resident_memory_bytes" in samples


def test_the_times_of_ranks_are_labelled_with_their_stages() -> None:
    """Ranks are reported from the last stage to the first."""
    times = (1_000_000, 2_000_000, 3_000_000, 4_000_000)
    stats = msgspec.structs.replace(STATS, rank_busy_us=times, rank_wait_us=times[::-1])
    families = {
        each.name: each for each in WorkerMetrics(Role.PREFILL, "p", lambda: stats, 2).collect()
    }
    found = {
        (sample.labels["stage"], sample.labels["rank"]): sample.value
        for sample in families["baton_worker_rank_busy_seconds"].samples
    }
    assert found == {("1", "0"): 1.0, ("1", "1"): 2.0, ("0", "0"): 3.0, ("0", "1"): 4.0}
    assert [s.value for s in families["baton_worker_rank_wait_seconds"].samples] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("host", "metrics_host", "expected"),
    [("127.0.0.1", None, "127.0.0.1"), ("127.0.0.1", "127.0.0.2", "127.0.0.2")],
)
def test_metrics_have_an_address_of_their_own(
    host: str, metrics_host: str | None, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SimpleNamespace(
        host=host, metrics_host=metrics_host, metrics_port=0, probe_port=None
    )
    probes = WorkerProbes(SimpleNamespace(phase="starting"), 10.0)
    with ExitStack() as stack, caplog.at_level(logging.INFO):
        registry = serve_probes(settings, probes, stack)
        registry.register(WorkerMetrics(Role.DECODE, "d-1", lambda: STATS))
        url = caplog.records[-1].getMessage().removeprefix("metrics and probes on ")
        assert url.startswith(f"http://{expected}:")
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            assert "baton_worker_num_waiting" in answer.read().decode()
