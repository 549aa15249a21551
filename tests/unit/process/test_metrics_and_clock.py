"""The metrics server, and the clock that leaves the process."""

from __future__ import annotations

import threading
import time
import urllib.request

import pytest
from prometheus_client import Counter

from process.clock import wall_us
from process.metrics.metrics_server import process_registry, start_metrics_server
from protocol.errors import ConfigError


def test_metrics_are_served_from_a_registry_of_their_own() -> None:
    registry = process_registry()
    Counter("baton_example", "An example", registry=registry).inc(3)
    server = start_metrics_server(0, "127.0.0.1", registry)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
        text = response.read().decode()
    assert "baton_example_total 3.0" in text
    assert "process_resident_memory_bytes" in text
    with pytest.raises(ConfigError, match=f"127.0.0.1:{server.port}"):
        start_metrics_server(server.port, "127.0.0.1", registry)
    server.close()
    assert "baton-metrics" not in {each.name for each in threading.enumerate()}


def test_the_wall_clock_never_goes_backwards_and_is_about_right() -> None:
    readings = [wall_us() for _ in range(10_000)]
    assert readings == sorted(readings)
    assert abs(readings[-1] - time.time() * 1e6) < 60e6
