"""One HTTP connection that a client cannot abuse: bounds on bytes received, memory and waits.

Adds what uvicorn's protocol lacks: limits on requests, on how many are read ahead, and on the time
that a client may leave an answer unread. Clients that leave, or send nothing more, are noticed at
once. While a client does not read, flow control holds up the code that makes the answer. After the
timeout the connection is aborted, and that code learns that the client is gone. Knows no paths.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.http.connection_limits import ConnectionLimits, Countdown
from gateway.http.half_closed import LateAnswers, Peers
from gateway.http.refusals import Refusal, RefusalLog
from gateway.http.request_reader import RequestReader
from http_kit.disconnect import offer_connection

log = logging.getLogger(__name__)

WRITE_BUFFER_BYTES = 64 * 1024
MAX_PIPELINED = 32
"""Requests read ahead of the one that is being answered."""
PARSED_AT_ONCE = 8 * 1024
"""Bytes; they hold some 300 requests, of which each takes 0.1 to 0.2 ms to read."""
CLOSE_HEADER = (b"connection", b"close")
"""Among the server's default headers, it closes each connection after the next answer."""
_OK = b"HTTP/1.1 200 OK\r\n"


class _UntilClose(int):
    """The length of an answer to an HTTP/1.0 client, which cannot read chunks: the answer ends with
    the connection. Uvicorn compares this length with the bytes written, and finds them equal."""

    def __lt__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> _UntilClose:
        return self

    __eq__ = int.__eq__
    __hash__ = int.__hash__


class BoundedProtocols:
    """Creates a server's protocols and counts the connections that they abort, by reason."""

    def __init__(self, limits: ConnectionLimits, registry: CollectorRegistry) -> None:
        self.limits = limits
        self.cut = Counter(
            "baton_http_connections_cut",
            "Connections that were ended for what their client did or did not do",
            ["reason"],
            registry=registry,
        )
        self.refusals = RefusalLog(log, time.monotonic)
        self.peers = Peers()

    def factory(self) -> Any:
        """The value for uvicorn's `http` setting."""
        return partial(BoundedProtocol, self)


class BoundedProtocol(RequestReader):
    """Uvicorn's protocol with bounds. Owns its timers, which end with the connection.

    A refused request is answered after all requests before it; nothing after it is read.
    """

    def __init__(self, shared: BoundedProtocols, *args: Any, **kwargs: Any) -> None:
        super().__init__(shared.limits, *args, **kwargs)
        self._cut = shared.cut
        self._refusals = shared.refusals
        self._peers = shared.peers
        self._late_answers: LateAnswers | None = None
        self._has_ended = False  # the client's data was read to its end
        self._last_answer: Refusal | None = None  # due after the answers before it
        self._is_ending = False  # everything is written; the client should close
        self._waiting = b""  # received; parsed once fewer requests are pipelined
        self._stall = Countdown(self.loop, shared.limits.stall_timeout_s, self._on_stall_timeout)
        self._on_lost: Callable[[], object] | None = None
        self._is_lost = False
        self._running: RequestResponseCycle | None = None  # others may be pipelined after it

    # -- the connection ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._is_receiving = True
        self._receiving.start()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and drop the last request, whose scope refers to this connection: the
        reference cycle would stay in memory until the garbage collector runs, which is rare."""
        self._receiving.close()
        self._stall.close()
        self._peers.forget(self)
        if self._late_answers is not None:
            self._late_answers.stop()
            self._late_answers = None
        self._is_lost = True
        super().connection_lost(exc)
        if self._running is not None:  # uvicorn notifies only the latest request
            self._running.disconnected = True
            self._running = None
        self.pipeline.clear()
        self._waiting = b""
        self.cycle = None  # type: ignore[assignment]
        self.scope = None  # type: ignore[assignment]
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost()

    def data_received(self, data: bytes) -> None:
        """Parse within bounds, a part at a time. Requests beyond `MAX_PIPELINED` wait, and no more
        is read until some are answered."""
        if self._waiting:
            self._waiting += data
            self.flow.pause_reading()  # which uvicorn ends whenever the application waits
        else:
            for start in range(0, len(data), PARSED_AT_ONCE):
                if len(self.pipeline) >= MAX_PIPELINED:
                    self._waiting = data[start:]
                    self.flow.pause_reading()
                    break
                if self._last_answer is not None or self.transport.is_closing():
                    break  # nothing is read after a refused request
                self._parse(data[start : start + PARSED_AT_ONCE])
        if self.flow.read_paused and self._owed() is not None:
            self._peers.try_watch_end(self, self.transport)  # reading would notice it late

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's data. True keeps the connection, for the answers to whole
        requests. In all other cases the client is gone."""
        owed = self._owed()
        if (
            owed is None
            or self.scheme == "https"
            or not self._peers.try_watch_reset(self, self.transport)
        ):
            return False
        self._has_ended = True
        self._close_after_last()
        self._answer_late(owed)
        return True

    def on_peer_ended(self) -> None:
        """Handle the end of the client's data while some of it is still unread."""
        owed = self._owed()
        if owed is None or not self.flow.read_paused:
            return  # reading will get there
        if self.scheme == "https":
            self._end()
        elif self._peers.try_watch_reset(self, self.transport):
            self._answer_late(owed)

    def on_peer_gone(self) -> None:
        """Handle a reset that reading would not notice."""
        self._end()

    def _owed(self) -> RequestResponseCycle | None:
        """The request that is being answered, if it was received completely."""
        running = self._running
        return None if running is None or running.more_body else running

    def _close_after_last(self) -> None:
        """Close the connection after the answer to the last whole request."""
        if self._waiting or self._last_answer is not None:
            return  # the last request still waits; a refusal closes by itself
        if self.pipeline and self.pipeline[0][0].more_body:
            self._drop(self.pipeline[0][0])
        last = self.pipeline[0][0] if self.pipeline else self._running
        if last is None or last.more_body:
            self.transport.close()
        else:
            last.keep_alive = False

    def _answer_late(self, owed: RequestResponseCycle) -> None:
        """Answer a client that sends nothing more, and find out whether it is still there."""
        if self._late_answers is not None:
            return
        self._late_answers = LateAnswers(
            self.transport, lambda: self._running, self._limits.stall_timeout_s
        )
        self.transport = cast("asyncio.Transport", self._late_answers)
        for cycle in (owed, *(each for each, _ in self.pipeline)):
            cycle.transport = self.transport

    def _go_on(self) -> None:
        """Parse the waiting bytes, now that fewer requests are pipelined."""
        waiting, self._waiting = self._waiting, b""
        if not self._is_lost:
            self.data_received(waiting)
            if self._has_ended:
                self._close_after_last()

    # -- requests, as they are read ---------------------------------------------------------

    def on_message_begin(self) -> None:
        """Handle a request's first byte."""
        if self.transport.get_write_buffer_size() == 0:
            self._stall.stop()  # the previous answer was read: its timer must not cut this one
        super().on_message_begin()
        offer_connection(self.scope, self)

    def on_headers_complete(self) -> None:
        """Handle the end of the head: the application starts."""
        former = self.cycle
        super().on_headers_complete()
        if self._is_upgrade:
            return
        if self.parser.get_http_version() == "1.0":
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _UntilClose()
        if former is None or former.response_complete:
            self._running = self.cycle

    def on_message_complete(self) -> None:
        """Handle the end of the request."""
        super().on_message_complete()
        if not self._is_upgrade and self.cycle is self._running:
            self.flow.resume_reading()  # the body is whole: from now on for the client's end

    def _refuse(self, refusal: Refusal) -> None:
        """Answer a malformed or oversized request, unless its answer has begun, and close the
        connection. The answers to earlier requests come first."""
        self._refusals.note(self.client, refusal.message)
        self._cut.labels(refusal.reason).inc()
        self._receiving.stop()
        self._last_answer = refusal
        cycle = self.cycle
        if cycle is not None and self._in_body:
            if cycle.response_complete:
                self._close()
                return
            if cycle is self._running and cycle.response_started:
                self._end()
                return
            self._drop(cycle)
        if self._running is not None:
            self.flow.resume_reading()
            return
        self._send_last_answer()

    def _drop(self, cycle: RequestResponseCycle) -> None:
        """Answer a request in place of the application, which may have begun to read it."""
        if cycle is self._running:
            self._running = None
            cycle.response_started = True  # here; `disconnected` discards the application's
        else:
            self.pipeline.popleft()
        cycle.disconnected = cycle.response_complete = True
        cycle.message_event.set()

    def _send_last_answer(self) -> None:
        """Send the refusal after the other answers, and nothing more."""
        assert self._last_answer is not None
        self.transport.write(self._last_answer.answer())
        self._close()

    def _close(self) -> None:
        """Close the connection once the client closes it, or its time to read the answers is up.
        Closing at once would lose the unread answers of a client that still sends. A client that
        has sent no request is not waited for."""
        self._is_ending = True
        self._unset_keepalive_if_required()
        if self._late_answers is None and self.cycle is not None and self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()
        self._stall.start()

    # -- for the code that answers, see `http_kit.disconnect.ClientConnection` ------------

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
        if self._is_lost:
            return
        running = self._running
        if running is not None and running.chunked_encoding is False:  # see `_UntilClose`
            self.transport.write(data)
        else:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def has_body(self, scope: Scope) -> bool:
        """Whether the request was received completely."""
        cycle = self._cycle_of(scope)
        return cycle is None or not cycle.more_body

    def try_body(self, scope: Scope) -> bytes | None:
        """The body that uvicorn's `receive` would return, if it is complete."""
        cycle = self._cycle_of(scope)
        if cycle is None or cycle.more_body or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def try_answer(self, scope: Scope, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write what uvicorn's `send` would for a response start and a whole body."""
        cycle = self._cycle_of(scope)
        if cycle is None or cycle.response_started or self.flow.write_paused:
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        defaults = self.server_state.default_headers
        lines = [b"%b: %b\r\n" % each for each in (*defaults, *headers)]
        if CLOSE_HEADER in defaults:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
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

    # -- time to read an answer -------------------------------------------------------------

    def pause_writing(self) -> None:
        """Hold up the code that makes the answer: the client reads too slowly."""
        super().pause_writing()
        self._stall.start()

    def resume_writing(self) -> None:
        """Let that code continue: the client has caught up."""
        if not self._is_ending:
            self._stall.stop()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Start the stall timer if bytes of the written answer are still buffered."""
        self._running = self.pipeline[-1][0] if self.pipeline else None
        if self._running is not None and self._running.more_body:
            self._receiving.stop()  # until now we did not read its body
            self._receiving.start(self._limits.body_window_s)
        super().on_response_complete()
        if len(self.pipeline) >= MAX_PIPELINED:
            self.flow.pause_reading()
        elif self._waiting:
            self.loop.call_soon(self._go_on)
        if self._last_answer is not None and self._running is None:
            if not self.transport.is_closing():
                self._send_last_answer()
        elif self.transport.get_write_buffer_size() > 0:
            self._stall.start()

    def _on_stall_timeout(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self._abort("answer not read in time")
        elif self._is_ending:
            self.transport.close()

    def _abort(self, reason: str) -> None:
        """Count and log the reason, and end the connection."""
        self._cut.labels(reason).inc()
        log.info("cut the connection of %s: %s", self.client, reason)
        self._end()

    def _end(self) -> None:
        """End the connection at once and discard unsent bytes."""
        self._receiving.stop()
        self._stall.stop()
        self.transport.abort()
