"""The metrics server, and the clock that leaves the process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.request

import pytest
from prometheus_client import Counter

from process.clock import clock_step_us, wall_us
from process.metrics import metrics_server
from process.metrics.metrics_server import (
    MOST_CONNECTIONS,
    process_registry,
    start_metrics_server,
)
from protocol.errors import ConfigError

WAIT_S = 60.0
PAUSE = threading.Event()


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


@pytest.mark.parametrize("step_s", [-7200.0, -1.5, -0.5, 0.0, 0.5, 7200.0])
def test_a_system_clock_that_is_set_moves_no_reading_and_the_step_is_known(
    monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    before, time_ns = wall_us(), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: time_ns() + round(step_s * 1e9))
    assert 0 <= wall_us() - before < 60e6
    expected_us = step_s * 1e6 if abs(step_s) > 1 else 0
    assert abs(clock_step_us() - expected_us) < 250_000


def _ask(port: int, path: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize("sent", [b"", b"GET /live HTTP/1.1\r\nx: ", b"x" * 100])
def test_slow_connections_neither_delay_probes_nor_take_threads(sent: bytes) -> None:
    probes = {"/live": lambda: None}
    servers = [
        start_metrics_server(0, "127.0.0.1", process_registry(), probes),
        start_metrics_server(0, "127.0.0.1", None, probes),
    ]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
            threads = threading.active_count()
            for _ in range(3 * MOST_CONNECTIONS):
                slow = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                slow.sendall(sent)
            assert _ask(server.port, "/live").startswith(b"HTTP/1.1 200 ")
            assert threading.active_count() == threads
        assert _ask(servers[1].port, "/metrics").startswith(b"HTTP/1.1 404 ")


def _trickle(client: socket.socket) -> None:
    """Send for ever: never silent, never done."""
    while client.send(b"x"):
        PAUSE.wait(0.01)


def test_a_connection_has_a_deadline_for_the_whole_exchange(monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "DEADLINE_S", 0.05)
    server = start_metrics_server(0, "127.0.0.1", process_registry())
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as slow:
            with pytest.raises(ConnectionError):
                _trickle(slow)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"POST /live HTTP/1.1\r\n\r\n", 405), (b"HEAD /live HTTP/1.1\r\n\r\n", 200)],
)
def test_other_methods(sent: bytes, status: int) -> None:
    server = start_metrics_server(0, "127.0.0.1", process_registry(), {"/live": lambda: None})
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as client:
            client.sendall(sent)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert answer.endswith(b"\r\n\r\n") == (status == 200)
    finally:
        server.close()


def test_clients_that_do_not_read_do_not_keep_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hold an answer larger than the kernel buffers; others have sent half a request."""
    monkeypatch.setattr(metrics_server, "DEADLINE_S", 10 * WAIT_S)
    asked = threading.Event()

    def verbose() -> str:
        asked.set()
        return "x" * 10**7

    server = start_metrics_server(0, "127.0.0.1", None, {"/verbose": verbose})
    with contextlib.ExitStack() as stack:
        for sent in (b"GET /verbose HTTP/1.1\r\n\r\n", b"GET /verbose HTTP/1.1\r\n", b""):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(sent)
        assert asked.wait(WAIT_S)
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive()


def test_clients_that_connect_while_the_server_ends_are_not_left_waiting() -> None:
    """The loop accepts them in the turn in which it learns of the end."""
    begun, goes_on = threading.Event(), threading.Event()

    def slow() -> str | None:
        begun.set()
        goes_on.wait(WAIT_S)
        return None

    server = start_metrics_server(0, "127.0.0.1", None, {"/slow": slow})
    with contextlib.ExitStack() as stack:
        first, *others = (
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), WAIT_S))
            for _ in range(5)
        )
        first.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        assert begun.wait(WAIT_S)
        others += [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), WAIT_S))
            for _ in range(5)
        ]
        server._loop.call_soon_threadsafe(server._stop.set)
        goes_on.set()
        server.close()
        for each in others:
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
