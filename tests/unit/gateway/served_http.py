"""The HTTP server on a test's own loop, and clients that do as little as they like."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from gateway.api.context import ApiLimits
from gateway.http.certificates import TlsFiles
from gateway.http.connection import BoundedProtocols
from gateway.http.connection_limits import ConnectionLimits
from gateway.http.server import Doorway, HttpServer, listen
from gateway.text.tokenizer import Tokenizer
from protocol.messages import FinishReason
from router.requests.interface import ServedModel, TokenDelta
from router_process.app import AppOptions, create_app
from tests.unit.gateway.api_harness import MODEL, ScriptedGenerator

WAIT_S = 60.0
SOON_S = 0.3
KERNEL_BYTES = 16 * 1024
MAX_BODY_BYTES = 20_000
COMPLETIONS = "/v1/completions"


class Served:
    """A server on the test's own loop, over a scripted generator."""

    def __init__(
        self, checkpoint: Path, tokenizer: Tokenizer, tls: TlsFiles | None = None, **limits
    ) -> None:
        self.num_produced = 0
        self.generator = ScriptedGenerator(lambda request: self._count(itertools.count()))
        self.registry = CollectorRegistry()
        model = ServedModel(MODEL, checkpoint, lambda: 10**9, created=0)
        known = {"max_head_bytes": 2000, "max_body_bytes": MAX_BODY_BYTES} | limits
        options = AppOptions(limits=ApiLimits(max_body_bytes=known["max_body_bytes"]))
        app = create_app(self.generator, tokenizer, model, self.registry, lambda: None, options)
        self.protocols = BoundedProtocols(ConnectionLimits(**known), self.registry)
        self.listener = listen("127.0.0.1", 0)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        self.clients: list[socket.socket] = []
        self.server = HttpServer(app, Doorway(self.protocols, tls), 1.0, lambda: None, lambda: None)

    def _count(self, steps):
        for _ in steps:
            self.num_produced += 1
            yield TokenDelta([70])

    def tokens(self, count: int) -> None:
        """Give every further generation `count` tokens."""
        self.generator.script = lambda request: itertools.chain(
            self._count(range(count - 1)), [TokenDelta([70], finish=FinishReason.LENGTH)]
        )

    async def connect(self) -> socket.socket:
        """A client that reads nothing by itself, with the smallest of buffers."""
        client = socket.socket()
        self.clients.append(client)
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, self.listener.getsockname())
        return client

    async def send(self, client: socket.socket, data: bytes) -> None:
        async with asyncio.timeout(WAIT_S):
            await asyncio.get_running_loop().sock_sendall(client, data)

    async def read_all(self, client: socket.socket) -> bytes:
        """Read everything until the server closes the connection."""
        found = bytearray()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionResetError):
                while part := await loop.sock_recv(client, 65536):
                    found += part
        return bytes(found)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"baton_http_{name}", labels) or 0.0

    def cuts(self, reason: str) -> float:
        return self.metric("connections_cut_total", reason=reason)

    def statuses(self, status: int) -> float:
        return self.metric("requests_total", endpoint=COMPLETIONS, status=str(status))

    async def until(self, condition) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def until_nothing_is_left(self) -> None:
        state = self.server.server_state
        await self.until(lambda: not state.connections and not state.tasks)
        self.generator.wait_idle()
        assert self.metric("requests_in_flight", endpoint=COMPLETIONS) == 0


Serve = Callable[..., Awaitable[Served]]


def completion(body: dict | None = None, **fields) -> bytes:
    content = json.dumps({"model": MODEL, "prompt": "Hi", **(body or {}), **fields}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(content)
    ) + content
