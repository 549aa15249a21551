"""One HTTP connection that a client cannot abuse: bounds on bytes received, memory and waits.

Adds the limits that uvicorn's protocol lacks: the size of a request's head and of the whole
message, the time to receive a request, and the time that a client may leave an answer unread.
While a client does not read, flow control holds up the code that makes the answer. After the
timeout the connection is aborted, and that code learns that the client is gone. Knows no paths.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from protocol.errors import RequestError
from router.http.disconnect import offer_connection
from router.http.errors import HttpError

log = logging.getLogger(__name__)

WRITE_BUFFER_BYTES = 64 * 1024
_OK = b"HTTP/1.1 200 OK\r\n"
_REASONS = {400: "Bad Request", 431: "Request Header Fields Too Large"}


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds on one connection.

    `max_head_bytes`: request line and headers (and trailers). `max_body_bytes`: the longest body
    that the application accepts; with chunk framing a message may be twice as long.
    `receive_timeout_s`: from the connection, or from a later request's first byte, to the end of
    the request. `stall_timeout_s`: to drain a full write buffer, or the rest of an answer.
    """

    max_head_bytes: int = 32 * 1024
    max_body_bytes: int = 32 * 1024 * 1024
    receive_timeout_s: float = 60.0
    stall_timeout_s: float = 30.0

    @property
    def max_message_bytes(self) -> int:
        """Bytes of one request on the wire."""
        return self.max_head_bytes + 2 * self.max_body_bytes


class BoundedProtocols:
    """Creates a server's protocols and counts the connections that they cut, by reason."""

    def __init__(self, limits: ConnectionLimits, registry: CollectorRegistry) -> None:
        self.limits = limits
        self.cut = Counter(
            "baton_http_connections_cut",
            "Connections that were ended for what their client did or did not do",
            ["reason"],
            registry=registry,
        )

    def factory(self) -> Any:
        """The value for uvicorn's `http` setting."""
        return partial(BoundedProtocol, self.limits, self.cut)


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with bounds. Owns its timers, which end with the connection."""

    def __init__(self, limits: ConnectionLimits, cut: Counter, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._cut = cut
        self._in_head = False
        self._head_bytes = 0
        self._message_bytes = 0
        self._is_head_too_large = False
        self._is_receiving = False
        self._receive_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._on_lost: Callable[[], object] | None = None
        self._is_lost = False
        self._running: RequestResponseCycle | None = None  # more may be pipelined behind it

    # -- the connection ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._is_receiving = True
        self._start_receiving()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and drop the last request, whose scope refers to this connection: the
        reference cycle would stay in memory until the garbage collector runs, which is rare."""
        self._stop_receiving()
        self._stop_stall()
        self._is_lost = True
        super().connection_lost(exc)
        if self._running is not None:  # uvicorn notifies only the latest request
            self._running.disconnected = True
            self._running = None
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]
        self.scope = None  # type: ignore[assignment]
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost()

    def data_received(self, data: bytes) -> None:
        """Parse within bounds. A message that begins in these bytes is counted from the next bytes
        on, and is timed only if these bytes do not complete it."""
        was_in_head = self._in_head
        if self.cycle is None or self.cycle.response_complete:
            self._is_receiving = True  # any byte ends the keep-alive time, even an empty line
        self._message_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_receiving and self._receive_timer is None:
            self._start_receiving()
        if was_in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_head_bytes:
                self._is_head_too_large = True
                self.send_400_response("")
        elif self._message_bytes > self._limits.max_message_bytes:
            self._abort("message too large")

    # -- parser callbacks -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Handle a request's first byte."""
        self._in_head = self._is_receiving = True
        self._head_bytes = 0
        self._message_bytes = 0
        if self.transport.get_write_buffer_size() == 0:
            self._stop_stall()  # the previous answer was read: its timer must not cut this one
        super().on_message_begin()
        offer_connection(self.scope, self)

    def on_url(self, url: bytes) -> None:
        """Handle a part of the URL."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header or a trailer."""
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Handle the end of the head: the application starts."""
        self._in_head = False
        former = self.cycle
        super().on_headers_complete()
        if former is None or former.response_complete:
            self._running = self.cycle

    def on_message_complete(self) -> None:
        """Handle the end of the request."""
        self._is_receiving = False
        self._stop_receiving()
        super().on_message_complete()

    def _count_head(self, num_bytes: int) -> None:
        """Count head bytes. Raises inside the parser, which then calls `send_400_response`."""
        self._head_bytes += num_bytes
        if self._head_bytes > self._limits.max_head_bytes:
            self._is_head_too_large = True
            raise ValueError("the head of the request is too large")

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed or oversized request and close the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._abort("malformed request")  # an answer has already begun, perhaps its own
            return
        status = 400
        if self._is_head_too_large:
            status = 431
            limit = self._limits.max_head_bytes
            msg = f"request line and headers may have {limit} bytes together"
        self._cut.labels("head too large" if status == 431 else "malformed request").inc()
        body = HttpError(status, msg, RequestError.kind).body()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._stop_receiving()
        self.transport.write(head.encode() + body)
        self.transport.close()
        self._start_stall()

    # -- for the code that answers, see `router.http.disconnect.ClientConnection` ------------

    @property
    def is_lost(self) -> bool:
        """Whether the client is gone."""
        return self._is_lost

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Call `on_lost` once when the client goes."""
        self._on_lost = on_lost

    def unwatch(self, on_lost: Callable[[], object]) -> None:
        """Remove `on_lost`, unless another callback has replaced it."""
        if self._on_lost is on_lost:
            self._on_lost = None

    @property
    def is_paused(self) -> bool:
        """Whether the write buffer is full."""
        return self.flow.write_paused

    async def wait_writable(self) -> None:
        """Wait until the write buffer has drained or the client is gone."""
        await self.flow.drain()

    def write_chunk(self, data: bytes) -> None:
        """Write one chunk of the answer's body."""
        if not self._is_lost:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def try_body(self, scope: Scope) -> bytes | None:
        """The body that uvicorn's `receive` would return, if it is complete."""
        cycle = self._cycle_of(scope)
        if cycle is None or cycle.more_body or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        self.flow.resume_reading()
        return body

    def try_answer(self, scope: Scope, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write what uvicorn's `send` would for a response start and a whole body."""
        cycle = self._cycle_of(scope)
        if cycle is None or cycle.response_started or self.flow.write_paused:
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        lines = [b"%b: %b\r\n" % each for each in (*self.server_state.default_headers, *headers)]
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        self.transport.write(
            b"%bcontent-length: %d\r\n%b\r\n%b" % (_OK, len(body), b"".join(lines), body)
        )
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def _cycle_of(self, scope: Scope) -> RequestResponseCycle | None:
        """Uvicorn's cycle for this request, if it is being answered and the client is there."""
        running = self._running
        return running if running is not None and running.scope is scope else None

    # -- time to receive --------------------------------------------------------------------

    def _start_receiving(self) -> None:
        self._receive_timer = self.loop.call_later(
            self._limits.receive_timeout_s, self._on_receive_timeout
        )

    def _stop_receiving(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _on_receive_timeout(self) -> None:
        if self.flow.read_paused:  # the delay is ours: we do not read
            self._start_receiving()
            return
        self._receive_timer = None
        self._abort("request not received in time")

    # -- time to read an answer -------------------------------------------------------------

    def pause_writing(self) -> None:
        """The client reads too slowly: the code that makes the answer has to wait."""
        super().pause_writing()
        self._start_stall()

    def resume_writing(self) -> None:
        """The client caught up."""
        self._stop_stall()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """The answer is written; start the stall timer if bytes of it are still buffered."""
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.transport.get_write_buffer_size() > 0:
            self._start_stall()

    def _start_stall(self) -> None:
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(
                self._limits.stall_timeout_s, self._on_stall_timeout
            )

    def _stop_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _on_stall_timeout(self) -> None:
        self._stall_timer = None
        if self.transport.get_write_buffer_size() > 0:
            self._abort("answer not read in time")

    def _abort(self, reason: str) -> None:
        """End the connection at once and discard unsent bytes."""
        self._cut.labels(reason).inc()
        log.info("cut the connection of %s: %s", self.client, reason)
        self._stop_receiving()
        self._stop_stall()
        self.transport.abort()
