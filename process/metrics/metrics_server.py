"""Prometheus metrics of a process, and a small HTTP server for them and for probes.

The server has a thread of its own, so it answers even while the process's main thread is busy.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from process.sockets.host_names import unbracketed
from protocol.errors import ConfigError

Probe = Callable[[], str | None]
"""A probe returns None if it passes, otherwise the reason. Called from the server's threads."""

MOST_CONNECTIONS = 32
DEADLINE_S = 10.0
_BACKLOG = 128
_TURNS_TO_BEGIN = 4
"""Turns of the loop after which `_take` runs for every connection accepted before."""
_MAX_HEAD_BYTES = 16 * 1024
_METRICS = "/metrics"
_TEXT = "text/plain; charset=utf-8"


def process_registry() -> CollectorRegistry:
    """A registry with the metrics of any process: its CPU time, memory and open files."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


class MetricsServer:
    """Serves a registry at `/metrics`, if it is given one, and probes at their paths: 200, or 503
    with the reason. Any other path is a 404. Owns socket, thread and connections."""

    def __init__(
        self,
        address: tuple[str, int],
        registry: CollectorRegistry | None,
        probes: Mapping[str, Probe],
    ) -> None:
        """Listens and serves. Raises OSError."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        self._registry = registry
        self._probes = probes
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # oldest first
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="baton-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that was chosen."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop serving."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._take, sock=self._listener, limit=_MAX_HEAD_BYTES, backlog=_BACKLOG
        )
        await self._stop.wait()
        self._loop.remove_reader(self._listener)  # a listener closed now may leave some open
        for _ in range(_TURNS_TO_BEGIN):
            await asyncio.sleep(0)
        server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, in place of the oldest one if there are too many."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MOST_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        self._connections[task] = writer
        try:
            async with asyncio.timeout(DEADLINE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # a client that went away or was too slow is not worth a line
        except asyncio.CancelledError:
            pass  # replaced by a later one, or the server ends
        finally:
            self._connections.pop(task, None)
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        """The answer to a request, by its method and path."""
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _message(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET\n", _TEXT)
        if path == _METRICS and self._registry is not None:
            content, kind = generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
            answer = _message(HTTPStatus.OK, content, kind)
        elif path in self._probes:
            reason = self._probes[path]()
            status = HTTPStatus.OK if reason is None else HTTPStatus.SERVICE_UNAVAILABLE
            answer = _message(status, f"{reason or 'ok'}\n".encode(), _TEXT)
        else:
            known = [] if self._registry is None else [_METRICS]
            text = f"there is nothing here, only {', '.join((*known, *self._probes))}\n"
            answer = _message(HTTPStatus.NOT_FOUND, text.encode(), _TEXT)
        return answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if method == "HEAD" else answer


def _message(status: HTTPStatus, content: bytes, content_type: str) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: {content_type}\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + content


def start_metrics_server(
    port: int,
    host: str,
    registry: CollectorRegistry | None,
    probes: Mapping[str, Probe] | None = None,
) -> MetricsServer:
    """Serve `registry` (None: no metrics) and `probes` on `host:port`; port 0 is any free one.
    Raises ConfigError."""
    try:
        return MetricsServer((unbracketed(host), port), registry, probes or {})
    except OSError as error:
        raise ConfigError(f"cannot serve metrics or probes on {host}:{port}: {error}") from error
