"""One HTTP connection that a client cannot abuse: bounds on bytes received, memory and waits.

A protocol for uvicorn's server, with limits on requests, on how many are read ahead, and on the
time that a client may leave an answer unread. Clients that leave, or send nothing more, are noticed
at once. While a client does not read, flow control holds up the code that makes the answer. After
the timeout the connection is aborted, and that code learns that the client is gone. Knows no paths.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter
from starlette.types import Scope
from uvicorn import Config
from uvicorn.server import ServerState

from gateway.http.connection_limits import ConnectionLimits, Countdown
from gateway.http.exchange import Exchange
from gateway.http.half_closed import LateAnswers, Peers
from gateway.http.refusals import NO_ROOM, Refusal, RefusalLog
from gateway.http.request_reader import RequestReader
from http_kit.disconnect import offer_connection
from process.open_files import is_reserved

log = logging.getLogger(__name__)

WRITE_BUFFER_BYTES = 64 * 1024
MAX_PIPELINED = 32
"""The most requests that are read ahead of the one being answered."""
PARSED_AT_ONCE = 8 * 1024
"""Most bytes parsed at once: some 300 requests, each of which takes 0.1 to 0.2 ms."""


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
    """A connection with bounds. Owns its timers, which end with it.

    A refused request is answered after all requests before it; nothing after it is read.
    """

    def __init__(
        self,
        shared: BoundedProtocols,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Takes `shared`, and the arguments that uvicorn passes to a protocol."""
        self._loop = _loop or asyncio.get_running_loop()
        super().__init__(shared.limits, self._loop)
        self._app = config.loaded_app
        self._server = server_state
        self._exchanges: deque[Exchange] = deque()  # the first is being answered
        self._cut, self._refusals, self._peers = shared.cut, shared.refusals, shared.peers
        self._late_answers: LateAnswers | None = None
        self._has_ended = False  # the client's data was read to its end
        self._last_answer: Refusal | None = None  # due after the answers before it
        self._is_ending = False  # everything is written; the client should close
        self._waiting = b""  # received; parsed once fewer requests are pipelined
        self._stall = Countdown(self._loop, shared.limits.stall_timeout_s, self._on_stall_timeout)
        self._on_lost: Callable[[], object] | None = None
        self._is_lost = False

    # -- the connection ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        self._server.connections.add(self)  # type: ignore[arg-type]  # lists uvicorn's own
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._idle = Countdown(self._loop, self._limits.idle_timeout_s, transport.close)
        client = transport.get_extra_info("socket")
        if client is not None and is_reserved(client.fileno()):
            self._cut.labels("no descriptors left").inc()
            transport.write(NO_ROOM.answer())
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and drop all requests; the application learns that the client is gone."""
        self._server.connections.discard(self)
        self._stall.close()
        self._idle.close()
        self._peers.forget(self)
        if self._late_answers is not None:
            self._late_answers.stop()
            self._late_answers = None
        self._is_lost = True
        for each in self._exchanges:
            each.abandon()
        self._exchanges.clear()
        self.flow.resume_writing()
        self._waiting = b""
        super().connection_lost(exc)
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost()

    def shutdown(self) -> None:
        """Close the connection after the requests that were read; uvicorn calls this at its end."""
        if self._exchanges:
            self._exchanges[-1].keep_alive = False
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse within bounds, a part at a time. Requests beyond `MAX_PIPELINED` wait, and no more
        is read until some are answered."""
        self._idle.stop()
        if self._waiting:
            self._waiting += data
            self.flow.pause_reading()  # an application that waits for a body had resumed it
        else:
            for start in range(0, len(data), PARSED_AT_ONCE):
                if len(self._exchanges) > MAX_PIPELINED:
                    self._waiting = data[start:]
                    self.flow.pause_reading()
                    break
                if self._last_answer is not None or self.transport.is_closing():
                    break  # nothing is read after a refused request
                self._parse(data[start : start + PARSED_AT_ONCE])
        if self.flow.read_paused and self._owed() is not None:
            # without this, only the next read would notice that the client has left
            self._peers.try_watch_end(self, self.transport)

    def eof_received(self) -> bool:
        """Handle the end of the client's data. True keeps the connection, for the answers to whole
        requests. In all other cases the client is gone."""
        owed = self._owed()
        if owed is None or self._is_tls or not self._peers.try_watch_reset(self, self.transport):
            return False
        self._has_ended = True
        self._close_after_last()
        self._answer_late()
        return True

    def on_peer_ended(self) -> None:
        """Handle the end of the client's data while some of it is still unread."""
        if self._owed() is None or not self.flow.read_paused:
            return  # a later read will reach it
        if self._is_tls:
            self._end()
        elif self._peers.try_watch_reset(self, self.transport):
            self._answer_late()

    def on_peer_gone(self) -> None:
        """Handle a reset that reading would not notice."""
        self._end()

    def _running(self) -> Exchange | None:
        """The request that is being answered."""
        return self._exchanges[0] if self._exchanges else None

    def _owed(self) -> Exchange | None:
        """The request that is being answered, if it was received completely."""
        running = self._running()
        return running if running is not None and running.is_received else None

    def _close_after_last(self) -> None:
        """Close the connection after the answer to the last whole request."""
        if self._waiting or self._last_answer is not None:
            return  # the last request still waits; a refusal closes by itself
        if len(self._exchanges) > 1 and not self._exchanges[-1].is_received:
            self._exchanges.pop().abandon()
        if self._exchanges and self._exchanges[-1].is_received:
            self._exchanges[-1].keep_alive = False
        else:
            self.transport.close()

    def _answer_late(self) -> None:
        """Answer a client that sends nothing more, and find out whether it is still there."""
        if self._late_answers is not None:
            return
        stall_s = self._limits.stall_timeout_s
        self._late_answers = LateAnswers(self.transport, self._running, stall_s)
        self.transport = cast("asyncio.Transport", self._late_answers)
        for each in self._exchanges:
            each.transport = self.transport

    def _parse_waiting(self) -> None:
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

    def _begin_exchange(self, scope: Scope, keep_alive: bool, awaits_continue: bool) -> Exchange:
        """Let the application answer the request, or queue it behind earlier requests."""
        offer_connection(scope, self)
        exchange = Exchange(
            scope,
            self.transport,
            self.flow,
            self._server,
            keep_alive,
            awaits_continue,
            self._on_complete,
        )
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._start(exchange)
        else:
            self.flow.pause_reading()
        return exchange

    def _start(self, exchange: Exchange) -> None:
        task = self._loop.create_task(exchange.run(self._app))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def on_message_complete(self) -> None:
        """Handle the end of the request."""
        super().on_message_complete()
        if self.flow.read_paused and not self._is_upgrade and self._exchange is self._running():
            self.flow.resume_reading()  # the body is complete: read on, to notice the client's end

    def _refuse(self, refusal: Refusal) -> None:
        """Answer a malformed or oversized request, unless its answer has begun, and close the
        connection. The answers to earlier requests come first."""
        self._refusals.note(self._ends["client"], refusal.message)
        self._cut.labels(refusal.reason).inc()
        self._receiving.stop()
        self._last_answer = refusal
        refused = self._exchange if self._in_body else None
        if refused is not None:
            if refused.is_complete:
                self._close()
                return
            if refused.is_begun:
                self._end()
                return
            self._exchanges.pop().abandon()  # the application may have begun to read it
        if self._exchanges:
            self.flow.resume_reading()
        else:
            self._send_last_answer()

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
        self._idle.stop()
        if self._late_answers is None and self._exchange and self.transport.can_write_eof():
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
        if not self._exchanges:
            return
        is_chunked = self._exchanges[0].is_chunked  # not for HTTP/1.0
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    def has_body(self, scope: Scope) -> bool:
        """Whether the request was received completely."""
        exchange = self._running_for(scope)
        return exchange is None or exchange.is_received

    def try_body(self, scope: Scope) -> bytes | None:
        """The body that ASGI's `receive` would return, if it is complete."""
        exchange = self._running_for(scope)
        return None if exchange is None else exchange.try_body()

    def try_answer(self, scope: Scope, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write what ASGI's `send` would for a response start and a whole body."""
        exchange = self._running_for(scope)
        if exchange is None or exchange.is_begun or self.flow.write_paused:
            return False
        exchange.answer(headers, body)
        return True

    def _running_for(self, scope: Scope) -> Exchange | None:
        """The request of this scope, if it is being answered and the client is there."""
        exchanges = self._exchanges
        return exchanges[0] if exchanges and exchanges[0].scope is scope else None

    # -- time to read an answer -------------------------------------------------------------

    def pause_writing(self) -> None:
        """Hold up the code that makes the answer: the client reads too slowly."""
        self.flow.pause_writing()
        self._stall.start()

    def resume_writing(self) -> None:
        """Let the code that makes the answer continue: the client has caught up."""
        if not self._is_ending:
            self._stall.stop()
        self.flow.resume_writing()

    def _on_complete(self) -> None:
        """Go on to the next request, and start the stall timer if bytes of the written answer are
        still buffered."""
        exchanges = self._exchanges
        exchanges.popleft()
        following = exchanges[0] if exchanges else None
        if following is not None and not following.is_received:
            self._receiving.stop()  # until now we did not read its body
            self._receiving.start(self._limits.body_window_s)
        if not self.transport.is_closing():
            if self.flow.read_paused:
                self.flow.resume_reading()
            if following is None:
                self._idle.start()
            else:
                self._start(following)
        if len(exchanges) > MAX_PIPELINED:
            self.flow.pause_reading()
        elif self._waiting:
            self._loop.call_soon(self._parse_waiting)
        if self._last_answer is not None and not exchanges:
            if not self.transport.is_closing():
                self._send_last_answer()
        elif self.transport.get_write_buffer_size() > 0:
            self._stall.start()

    def _on_stall_timeout(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self.abort("answer not read in time")
        elif self._is_ending:
            self.transport.close()

    def abort(self, reason: str) -> None:
        """Count and log the reason, and end the connection."""
        self._cut.labels(reason).inc()
        log.info("cut the connection of %s: %s", self._ends["client"], reason)
        self._end()

    def _end(self) -> None:
        """End the connection at once and discard unsent bytes."""
        self._receiving.stop()
        self._stall.stop()
        self.transport.abort()
