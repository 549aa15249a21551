"""Prometheus metrics of a process: its own registry and a server for the registry."""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from protocol.errors import ConfigError


def process_registry() -> CollectorRegistry:
    """A registry with the metrics of any process: its CPU time, memory and open files."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


class MetricsServer:
    """Serves a registry at `/metrics` from its own thread. Owns socket and thread."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """The port that was chosen."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start_metrics_server(port: int, host: str, registry: CollectorRegistry) -> MetricsServer:
    """Serve `registry` on `host:port`; port 0 is any free one. Raises ConfigError."""
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error}") from error
    return MetricsServer(server, thread)
