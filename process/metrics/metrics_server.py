"""Prometheus metrics of a process, and a small HTTP server for them and for probes.

The server has a thread of its own, so that it answers whatever the process's main thread does.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from process.sockets.hosts import unbracketed
from protocol.errors import ConfigError

Probe = Callable[[], str | None]
"""Returns None for yes, else the reason why not. Called from the server's threads."""

_METRICS = "/metrics"
_CLIENT_TIMEOUT_S = 10.0
_CLOSE_POLL_S = 0.05


def process_registry() -> CollectorRegistry:
    """A registry with the metrics of any process: its CPU time, memory and open files."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


class MetricsServer(ThreadingHTTPServer):
    """Serves a registry at `/metrics`, and probes at their paths: 200, or 503 with the reason. Any
    other path is a 404. Owns socket and threads."""

    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        registry: CollectorRegistry,
        probes: Mapping[str, Probe],
    ) -> None:
        """Listens and serves. Raises OSError."""
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.registry = registry
        self.probes = probes
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_CLOSE_POLL_S,), name="baton-metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that was chosen."""
        return int(self.server_port)

    def server_bind(self) -> None:
        """Bind without asking a name server for this host's name."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or sent nothing in time, is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = _CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        """Answer by path."""
        path = self.path.partition("?")[0]
        if path == _METRICS:
            self._answer(200, generate_latest(self.server.registry), CONTENT_TYPE_PLAIN_0_0_4)
        elif path in self.server.probes:
            reason = self.server.probes[path]()
            self._answer(200 if reason is None else 503, f"{reason or 'ok'}\n".encode())
        else:
            known = ", ".join((_METRICS, *self.server.probes))
            self._answer(404, f"there is nothing here, only {known}\n".encode())

    def _answer(
        self, status: int, content: bytes, content_type: str = "text/plain; charset=utf-8"
    ) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Probes come every few seconds: nothing is logged."""


def start_metrics_server(
    port: int, host: str, registry: CollectorRegistry, probes: Mapping[str, Probe] | None = None
) -> MetricsServer:
    """Serve `registry` and `probes` on `host:port`; port 0 is any free one. Raises ConfigError."""
    try:
        return MetricsServer((unbracketed(host), port), registry, probes or {})
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error}") from error
