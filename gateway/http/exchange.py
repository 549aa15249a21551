"""One HTTP request and its answer, as the application sees them through ASGI.

An exchange holds the part of the body that the application has not taken yet, and writes the answer
with the framing that its head announces. Knows no limits and no parser: its connection feeds it.
"""

from __future__ import annotations

import asyncio
import http
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Protocol

import msgspec
from msgspec import field
from starlette.types import ASGIApp, Message, Scope

from gateway.http.flow_control import Flow

log = logging.getLogger(__name__)

CLOSE_HEADER = (b"connection", b"close")
"""Among the server's default headers, it closes each connection after its next answer."""
MAX_WAITING_BODY = 64 * 1024
"""If the application has left more bytes of a body untaken than this, reading stops."""

Headers = Iterable[tuple[bytes, bytes]]

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FAILURE = b"Internal Server Error"
_WITHOUT_BODY = frozenset((204, 304))
_is_no_name = re.compile(rb"[^!#$%&'*+.^_`|~0-9A-Za-z-]").search
_is_no_value = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]").search


class AnsweringServer(Protocol):
    """The server that an answer comes from; it may change its headers at any time."""

    @property
    def default_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Headers of every answer."""
        ...


class Exchange(msgspec.Struct, eq=False):
    """One request and its answer. If the connection replaces its transport, it also sets
    `transport` here.

    - `keep_alive`: whether the connection stays open after the answer.
    - `awaits_continue`: whether the client sends its body only after a `100 Continue`.
    - `on_complete`: called once the answer is written.
    - `is_received`: whether the body was received to its end.
    - `is_abandoned`: whether the rest of the answer is dropped: the client is gone, or has got
      another answer.
    """

    scope: Scope
    transport: asyncio.Transport
    flow: Flow
    server: AnsweringServer
    keep_alive: bool
    awaits_continue: bool
    on_complete: Callable[[], None]
    is_received: bool = False
    is_begun: bool = False
    is_complete: bool = False
    is_chunked: bool = False
    is_abandoned: bool = False
    _body: bytearray = field(default_factory=bytearray)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _left: int | None = None
    """Bytes of the answer that its content-length still promises."""
    _has_body: bool = True

    async def run(self, app: ASGIApp) -> None:
        """Let the application answer. If it fails, the client gets status 500, or an answer that
        ends early if it has begun."""
        try:
            await app(self.scope, self._receive, self._send)
            if not self.is_complete:
                raise RuntimeError("the application returned before its answer was complete")
        except asyncio.CancelledError:
            self._fail()
            raise
        except Exception:
            if not self.is_abandoned:
                log.exception("%s %s failed", self.scope["method"], self.scope["path"])
            self._fail()
        finally:
            self.on_complete = _nothing

    # -- the request ------------------------------------------------------------------------

    def add_body(self, data: bytes) -> None:
        """Hold more of the body for the application."""
        if self.is_complete:
            return
        self._body += data
        if len(self._body) > MAX_WAITING_BODY:
            self.flow.pause_reading()
        self._news.set()

    def end_body(self) -> None:
        """Note that the body was received to its end."""
        if not self.is_complete:
            self.is_received = True
            self._news.set()

    def try_body(self) -> bytes | None:
        """The body, if it has arrived whole and the client did not wait for `100 Continue`. Can be
        taken once."""
        return self._take_body() if self.is_received and not self.awaits_continue else None

    def _take_body(self) -> bytes:
        body, self._body = bytes(self._body), bytearray()
        return body

    async def _receive(self) -> Message:
        if self.awaits_continue and not self.transport.is_closing():
            self.transport.write(_CONTINUE)
            self.awaits_continue = False
        if not self.is_complete:
            self.flow.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self.is_complete:
            return {"type": "http.disconnect"}
        return {
            "type": "http.request",
            "body": self._take_body(),
            "more_body": not self.is_received,
        }

    # -- the answer -------------------------------------------------------------------------

    def answer(self, headers: Headers, body: bytes) -> None:
        """Write a whole answer with status 200. The headers must be valid and without
        content-length."""
        self.is_begun = True
        defaults = self.server.default_headers
        lines = [b"%b: %b\r\n" % each for each in (*defaults, *headers)]
        if CLOSE_HEADER in defaults:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        self.transport.write(
            b"%bcontent-length: %d\r\n%b\r\n%b"
            % (_status_line(200), len(body), b"".join(lines), body)
        )
        self._complete()

    def abandon(self) -> None:
        """Drop the rest of the answer. The application is told that its client is gone."""
        self.is_abandoned = self.is_complete = True
        self._news.set()

    async def _send(self, message: Message) -> None:
        if self.flow.write_paused and not self.is_abandoned:
            await self.flow.drain()
        if self.is_abandoned:
            return
        if self.is_complete:
            raise RuntimeError(f"{message['type']} after the end of the answer")
        if message["type"] != ("http.response.body" if self.is_begun else "http.response.start"):
            raise RuntimeError(f"{message['type']} out of order")
        if self.is_begun:
            self._write_part(message.get("body", b""), message.get("more_body", False))
        else:
            self._begin(message["status"], message.get("headers", ()))

    def _begin(self, status: int, headers: Headers) -> None:
        """Write the head, which decides how the client finds the end of the body."""
        self.is_begun = True
        self.awaits_continue = False
        self._has_body = self.scope["method"] != "HEAD" and status not in _WITHOUT_BODY
        lines = [_status_line(status)]
        closes = False
        for name, value in (*self.server.default_headers, *headers):
            if _is_no_name(name) or _is_no_value(value):
                raise RuntimeError(f"the header {name!r}: {value!r} cannot be sent")
            name = name.lower()
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection" and b"close" in value.lower():
                closes = True
            lines.append(b"%b: %b\r\n" % (name, value))
        if closes:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self._has_body and self._left is None and self.scope["http_version"] != "1.0":
            self.is_chunked = True  # HTTP/1.0 has no chunks: the answer ends with the connection
            lines.append(b"transfer-encoding: chunked\r\n")
        self.transport.write(b"%b\r\n" % b"".join(lines))

    def _write_part(self, body: bytes, more_body: bool) -> None:
        """Write a part of the body."""
        if self.is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self.transport.write(chunk if more_body else chunk + b"0\r\n\r\n")
        elif self._has_body:
            if self._left is not None:
                self._left -= len(body)
                if self._left < 0 or (self._left > 0 and not more_body):
                    raise RuntimeError("the answer's length is not its content-length")
            self.transport.write(body)
        if not more_body:
            self._complete()

    def _complete(self) -> None:
        self.is_complete = True
        self._news.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_complete()

    def _fail(self) -> None:
        """End an answer that the application left incomplete."""
        if self.is_abandoned:
            return
        if self.is_begun:
            self.transport.close()
            return
        self.keep_alive = False
        length = b"%d" % len(_FAILURE)
        self._begin(500, [(b"content-type", b"text/plain"), (b"content-length", length)])
        self._write_part(_FAILURE, more_body=False)


@cache
def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())


def _nothing() -> None:
    """The callback of an exchange that has ended: it refers to no connection."""
