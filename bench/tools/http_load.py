"""A cheap HTTP client for measuring servers: keep-alive connections on bare asyncio protocols.

Does as little work per byte as possible, so that a small machine measures the server and not the
client: answers are not parsed, only counted by markers in their bytes. A wrong status, an error
event, a missing end and a broken connection are errors.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from dataclasses import dataclass, field

_EVENT = b"data: {"
_DONE = b"data: [DONE]"
_STREAM_END = b"0\r\n\r\n"
_HEAD_END = b"\r\n\r\n"
_TAIL_BYTES = 64


@dataclass
class LoadResult:
    """The results of a load. Seconds are of `time.perf_counter`; `ids` are Baton's request ids."""

    seconds: float = 0.0
    requests: int = 0
    events: int = 0
    errors: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    @property
    def requests_per_s(self) -> float:
        """Finished requests per second."""
        return self.requests / self.seconds


def post(path: str, host: str, body: bytes) -> bytes:
    """A request's bytes."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Client(asyncio.Protocol):
    """One connection; sends one request at a time."""

    def __init__(self, result: LoadResult, keeps_ids: bool) -> None:
        self._result = result
        self._keeps_ids = keeps_ids
        self._answer: asyncio.Future[None] | None = None
        self._head = b""
        self._tail = b""
        self._is_chunked = self._is_stream = False
        self._left = 0
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def request(self, data: bytes) -> asyncio.Future[None]:
        """Send a request; the future is done when the answer is complete."""
        self._answer = asyncio.get_running_loop().create_future()
        self._head = self._tail = b""
        self._left = -1
        self._sent_at = time.perf_counter()
        self.transport.write(data)
        return self._answer

    def data_received(self, data: bytes) -> None:
        if self._left < 0:
            self._head += data
            end = self._head.find(_HEAD_END)
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + len(_HEAD_END) :]
            self._begin(head)
        if self._is_chunked:
            self._result.events += (self._tail[-len(_EVENT) + 1 :] + data).count(_EVENT)
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            if self._tail.endswith(_STREAM_END):
                is_whole = not self._is_stream or _DONE in self._tail
                self._end(None if is_whole else "a stream without its end")
        else:
            self._left -= len(data)
            if self._left <= 0:
                self._end(None)

    def _begin(self, head: bytes) -> None:
        self._result.first_s.append(time.perf_counter() - self._sent_at)
        if b" 200 " not in head.partition(b"\r\n")[0] + b" ":
            self._result.errors.append(head.partition(b"\r\n")[0].decode())
        if self._keeps_ids:
            self._result.ids.append(_header(head, b"x-baton-request-id"))
        self._is_chunked = b"transfer-encoding: chunked" in head
        self._is_stream = b"content-type: text/event-stream" in head
        self._left = 0 if self._is_chunked else int(_header(head, b"content-length") or 0)

    def _end(self, error: str | None) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        if error is not None:
            self._result.errors.append(error)
        self._result.requests += 1
        self._result.latencies_s.append(time.perf_counter() - self._sent_at)
        answer.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection broke: {exc}")


def _header(head: bytes, name: bytes) -> str:
    return head.partition(b"\r\n" + name + b": ")[2].partition(b"\r\n")[0].decode()


async def run_load(
    targets: list[tuple[str, int]],
    requests: list[bytes],
    concurrency: int,
    count: int,
    keeps_ids: bool = False,
) -> LoadResult:
    """Send `count` requests, cycling through `requests`, over `concurrency` connections in total.

    Connections are spread over the targets (host, port). Raises OSError if a connection fails.
    """
    result = LoadResult()
    loop = asyncio.get_running_loop()
    clients: list[_Client] = []
    for (host, port), _ in zip(itertools.cycle(targets), range(concurrency), strict=False):
        _, client = await loop.create_connection(lambda: _Client(result, keeps_ids), host, port)
        clients.append(client)
    pending = iter(range(count))

    async def work(client: _Client) -> None:
        for number in pending:
            if client.transport.is_closing():
                return
            await client.request(requests[number % len(requests)])

    started = time.perf_counter()
    await asyncio.gather(*map(work, clients))
    result.seconds = time.perf_counter() - started
    for client in clients:
        client.transport.close()
    return result
