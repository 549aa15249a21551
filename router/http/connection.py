"""One HTTP connection that a client cannot abuse: bounds on what is received, kept and waited for.

Adds to uvicorn's protocol what it leaves open: the size of a request's head and of the whole
message, the time that receiving it may take, and the time that a client may leave an answer
unread. While it does not read, the answer's maker is held up by the flow control; when its time
is over the connection is aborted, and the maker learns that the client is gone. Knows no paths.
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

    `max_head_bytes`: request line and headers (and trailers). `max_body_bytes`: what the
    application takes; a message may be twice as long with the framing of its chunks.
    `receive_timeout_s`: from the connection, or a further request's first byte, to the request's
    end. `stall_timeout_s`: for a full write buffer to drain, and for an answer's rest to leave.
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
    """Makes the protocols of a server; counts the connections that they cut, by reason."""

    def __init__(self, limits: ConnectionLimits, registry: CollectorRegistry) -> None:
        self.limits = limits
        self.cut = Counter(
            "baton_http_connections_cut",
            "Connections that were ended for what their client did or did not do",
            ["reason"],
            registry=registry,
        )

    def factory(self) -> Any:
        """For uvicorn's `http` setting."""
        return partial(BoundedProtocol, self.limits, self.cut)


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, with bounds. Timers belong to it and end with the connection."""

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
        self._running: RequestResponseCycle | None = None  # others may be pipelined behind it

    # -- the connection ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._is_receiving = True
        self._start_receiving()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers, and lets go of the last request, whose scope holds this connection: what
        refers to itself would be kept until the collector looks, which is seldom."""
        self._stop_receiving()
        self._stop_stall()
        self._is_lost = True
        super().connection_lost(exc)
        if self._running is not None:  # uvicorn tells the latest request only
            self._running.disconnected = True
            self._running = None
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]
        self.scope = None  # type: ignore[assignment]
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost()

    def data_received(self, data: bytes) -> None:
        """Parses, within bounds. What began in these very bytes is counted from the next on, and
        timed if it did not end in them."""
        was_in_head = self._in_head
        if self.cycle is None or self.cycle.response_complete:
            self._is_receiving = True  # bytes that begin nothing end the keep-alive time, too
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

    # -- what the parser finds --------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._in_head = self._is_receiving = True
        self._head_bytes = 0
        self._message_bytes = 0
        if self.transport.get_write_buffer_size() == 0:
            self._stop_stall()  # the answer before was read: its time is not the next one's
        super().on_message_begin()
        offer_connection(self.scope, self)

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The end of the head: the application starts."""
        self._in_head = False
        former = self.cycle
        super().on_headers_complete()
        if former is None or former.response_complete:
            self._running = self.cycle

    def on_message_complete(self) -> None:
        """The whole request is here."""
        self._is_receiving = False
        self._stop_receiving()
        super().on_message_complete()

    def _count_head(self, num_bytes: int) -> None:
        """Raises within the parser, which ends in `send_400_response`."""
        self._head_bytes += num_bytes
        if self._head_bytes > self._limits.max_head_bytes:
            self._is_head_too_large = True
            raise ValueError("the head of the request is too large")

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed, or is too large, is answered and the connection closed."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._abort("malformed request")  # in the middle of another answer, or of its own
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

    # -- for whoever answers, see `router.http.disconnect.ClientConnection` ------------------

    @property
    def is_lost(self) -> bool:
        """Whether the client is gone."""
        return self._is_lost

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Call this once when the client goes."""
        self._on_lost = on_lost

    def unwatch(self, on_lost: Callable[[], object]) -> None:
        """Unless somebody else watches by now."""
        if self._on_lost is on_lost:
            self._on_lost = None

    @property
    def is_paused(self) -> bool:
        """Whether the write buffer is full."""
        return self.flow.write_paused

    async def wait_writable(self) -> None:
        """Returns when the write buffer has drained, or the client is gone."""
        await self.flow.drain()

    def write_chunk(self, data: bytes) -> None:
        """One chunk of the answer's body."""
        if not self._is_lost:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def try_body(self, scope: Scope) -> bytes | None:
        """What uvicorn's `receive` would give, if that is all."""
        cycle = self._cycle_of(scope)
        if cycle is None or cycle.more_body or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        self.flow.resume_reading()
        return body

    def try_answer(self, scope: Scope, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """What uvicorn's `send` does with a start and a whole body."""
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
        """Uvicorn's object for this request, if it is being answered and its client is there."""
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
        if self.flow.read_paused:  # it is we who do not read
            self._start_receiving()
            return
        self._receive_timer = None
        self._abort("request not received in time")

    # -- time to read an answer -------------------------------------------------------------

    def pause_writing(self) -> None:
        """The client reads too slowly: whoever makes the answer waits from now on."""
        super().pause_writing()
        self._start_stall()

    def resume_writing(self) -> None:
        """The client caught up."""
        self._stop_stall()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """The answer is written; what of it is still here must leave in time, too."""
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
        """End the connection at once, whatever is still to be sent."""
        self._cut.labels(reason).inc()
        log.info("cut the connection of %s: %s", self.client, reason)
        self._stop_receiving()
        self._stop_stall()
        self.transport.abort()
