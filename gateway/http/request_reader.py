"""Reads the requests of one connection within bounds: of a head, of a message, of time and rate.

Heads are read strictly (`gateway.http.request_head`). Trailers count as head and are dropped;
`Upgrade` is ignored. Knows nothing of answers: its subclass, the connection, begins the exchange of
each request and handles refused ones.
"""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn
from urllib.parse import unquote

import httptools
from starlette.types import Scope

from gateway.http.connection_limits import ConnectionLimits, Countdown
from gateway.http.exchange import Exchange
from gateway.http.flow_control import Flow
from gateway.http.refusals import HEAD_TOO_SLOW, MALFORMED, Refusal, Refused
from gateway.http.request_head import (
    FRAMING_HEADERS,
    OTHER_PROTOCOL,
    HeadReader,
    head_without_upgrade,
    is_of_other_protocol,
)


class RequestReader(asyncio.Protocol):
    """A connection that requests are read from, one after the other, within bounds. Owns the timer
    of receiving, which ends with the connection."""

    transport: asyncio.Transport
    flow: Flow

    def __init__(self, limits: ConnectionLimits, loop: asyncio.AbstractEventLoop) -> None:
        self._limits = limits
        self._parser: Any = self._new_parser()
        self._exchange: Exchange | None = None  # of the latest request whose head was read
        self._ends: Scope = {}  # of every request's scope: the two ends of the connection
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head = HeadReader()
        self._in_head = False
        self._began = False  # a request, in the bytes being parsed
        self._in_body = False
        self._is_upgrade = False
        self._part_bytes = 0  # of the body, since its time began to run
        self._head_bytes = 0
        self._bytes_after_body = 0  # received since the last byte of content: perhaps trailers
        self._message_bytes = 0
        self._refusal = MALFORMED
        self._data = b""  # being parsed
        self._head_start = bytearray()  # of the request whose head is not complete yet
        self._is_receiving = False
        self._receiving = Countdown(loop, limits.receive_timeout_s, self._on_receive_timeout)

    # -- for the subclass -------------------------------------------------------------------

    def _begin_exchange(self, scope: Scope, keep_alive: bool, awaits_continue: bool) -> Exchange:
        """Let the application answer a request whose head was read."""
        raise NotImplementedError

    def _refuse(self, refusal: Refusal) -> None:
        """Answer a malformed or oversized request; nothing more is parsed."""
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        """Count and log why, and end the connection."""
        raise NotImplementedError

    # -- the connection ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        self.transport = transport
        self.flow = Flow(transport)
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        client, server = (transport.get_extra_info(each) for each in ("peername", "sockname"))
        self._ends = {
            "client": client and client[:2],  # an IPv6 address has four parts
            "server": server and server[:2],
            "scheme": "https" if self._is_tls else "http",
        }
        self._is_receiving = True
        self._receiving.start()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and drop what refers to this connection: the reference cycles would stay
        in memory until the garbage collector runs, which is rare."""
        self._receiving.close()
        self._parser = None
        self._exchange = None

    # -- parsing ----------------------------------------------------------------------------

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _parse(self, data: bytes) -> None:
        """Parse some bytes. A message that begins in them is counted from the next bytes on, and is
        timed only if these bytes do not complete it."""
        was_in_body = self._in_body
        self._began = False
        if self._exchange is None or self._exchange.is_complete:
            self._is_receiving = True  # any byte ends the keep-alive time, even an empty line
        num_bytes, head_bytes = len(data), self._head_bytes
        self._message_bytes += num_bytes
        self._bytes_after_body += num_bytes
        self._data = data
        may_go_on = self._try_parse(data) and not self.transport.is_closing()
        self._data = b""
        if not may_go_on:
            return
        if self._in_head:
            self._head_start += data
        if self._is_receiving:
            self._receiving.start(self._limits.body_window_s if self._in_body else None)
        if self._in_head and not self._began:
            self._head_bytes = max(self._head_bytes, head_bytes + num_bytes)  # a line may not end
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse(self._limits.head_too_large())
        elif self._message_bytes > self._limits.max_message_bytes:
            self.abort("message too large")
        elif (
            was_in_body
            and self._bytes_after_body >= num_bytes  # all of these bytes came after content
            and self._head_bytes + self._bytes_after_body > self._limits.max_head_bytes
            and self._in_body
        ):
            self._refuse(self._limits.head_too_large())

    def _try_parse(self, data: bytes) -> bool:
        """Feed the parser; False after a refusal."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._try_parse_rest(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(self._refusal)
            return False
        return True

    def _try_parse_rest(self, rest: memoryview) -> bool:
        """Read a request that asks for an upgrade, and the bytes after its head, as if it did not
        ask. The parser takes everything after such a head for another protocol, so a new parser
        reads the head again without the `Upgrade`. False after a refusal."""
        try:
            while True:
                self._is_upgrade = False
                head = head_without_upgrade(
                    self._parser.get_method(),
                    self._url,
                    self._parser.get_http_version(),
                    self._headers,
                )
                self._parser = self._new_parser()
                self._parser.feed_data(head)
                try:
                    self._parser.feed_data(rest)
                    return True
                except httptools.HttpParserUpgrade as upgrade:
                    rest = rest[upgrade.args[0] :]
        except Refused as refused:
            self._refuse(refused.refusal)
        except httptools.HttpParserError:
            self._refuse(self._refusal)
        return False

    # -- parser callbacks -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Handle a request's first byte."""
        self._in_head = self._is_receiving = self._began = True
        self._in_body = False
        self._head_bytes = 0
        self._message_bytes = 0
        self._url = b""
        self._headers = []
        self._head.begin()

    def on_url(self, url: bytes) -> None:
        """Handle a part of the URL."""
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.max_head_bytes:
            self._refuse_head()
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header, or count and drop a trailer."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._limits.max_head_bytes:
            self._refuse_head()
        if self._in_body:
            return
        name = name.lower()
        if name in FRAMING_HEADERS:
            try:
                self._head.take(name, value)
            except Refused as refused:
                self._refusal = refused.refusal
                raise
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Handle the end of the head: the application starts."""
        method, version = self._parser.get_method(), self._parser.get_http_version()
        try:
            if is_of_other_protocol(self._head_start, self._data, method, self._url):
                raise Refused(OTHER_PROTOCOL)
            self._head.end(method, self._url, version)
        except Refused as refused:
            self._refusal = refused.refusal
            raise
        if self._parser.should_upgrade():
            self._is_upgrade = True  # the parser stops here, see `_try_parse_rest`
            return
        self._in_head = False
        self._head_start.clear()
        self._in_body = True
        self._part_bytes = 0
        self._receiving.stop()
        self._bytes_after_body = 0
        self._exchange = self._begin_exchange(
            self._scope(method, version),
            keep_alive=version != "1.0" and self._parser.should_keep_alive(),
            awaits_continue=self._head.expects_continue,
        )

    def _scope(self, method: bytes, version: str) -> Scope:
        """The request as ASGI describes it."""
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": method.decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self._headers,
            **self._ends,
        }

    def on_body(self, body: bytes) -> None:
        """Handle a part of the body. Every `body_part_bytes` that arrive, in any number of pieces,
        restart the time that the client has for the next ones."""
        self._bytes_after_body = 0
        self._part_bytes += len(body)
        if self._part_bytes >= self._limits.body_part_bytes:
            self._part_bytes = 0
            self._receiving.stop()
        assert self._exchange is not None
        self._exchange.add_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of the request."""
        if self._is_upgrade:
            return
        self._in_body = False
        self._is_receiving = False
        self._receiving.stop()
        assert self._exchange is not None
        self._exchange.end_body()

    def _refuse_head(self) -> NoReturn:
        """Refuse a head that is too large. Raises inside the parser, which ends the parsing."""
        self._refusal = self._limits.head_too_large()
        raise Refused(self._refusal)

    # -- time to receive --------------------------------------------------------------------

    def _on_receive_timeout(self) -> None:
        if self.flow.read_paused:  # the delay is our own, because reading is paused
            self._part_bytes = 0
            self._receiving.start(self._limits.body_window_s if self._in_body else None)
        elif self._in_body:
            self._refuse(self._limits.body_too_slow())
        elif self._in_head:
            self._refuse(HEAD_TOO_SLOW)
        else:
            self.abort(HEAD_TOO_SLOW.reason)
