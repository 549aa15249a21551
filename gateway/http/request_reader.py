"""Reads the requests of one connection within bounds: of a head, of a message, of time and rate.

Heads are read strictly (`gateway.http.request_head`). Trailers count as head and are dropped;
`Upgrade` is ignored. Knows nothing of answers: its subclass, the connection, handles refused
requests.
"""

from __future__ import annotations

from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.connection_limits import ConnectionLimits, Countdown
from gateway.http.refusals import HEAD_TOO_SLOW, MALFORMED, Refusal, Refused
from gateway.http.request_head import (
    FRAMING_HEADERS,
    OTHER_PROTOCOL,
    HeadReader,
    head_without_upgrade,
    is_of_other_protocol,
)


class RequestReader(HttpToolsProtocol):
    """Uvicorn's protocol with bounds on what it receives. Owns the timer of receiving, which ends
    with the connection."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
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
        self._receiving = Countdown(self.loop, limits.receive_timeout_s, self._on_receive_timeout)

    # -- for the subclass -------------------------------------------------------------------

    def _refuse(self, refusal: Refusal) -> None:
        """Answer a malformed or oversized request; nothing more is parsed."""
        raise NotImplementedError

    def _abort(self, reason: str) -> None:
        """Count and log why, and end the connection."""
        raise NotImplementedError

    # -- parsing ----------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        """Parse some bytes. A message that begins in them is counted from the next bytes on, and is
        timed only if these bytes do not complete it."""
        was_in_body = self._in_body
        self._began = False
        if self.cycle is None or self.cycle.response_complete:
            self._is_receiving = True  # any byte ends the keep-alive time, even an empty line
        num_bytes, head_bytes = len(data), self._head_bytes
        self._message_bytes += num_bytes
        self._bytes_after_body += num_bytes
        self._unset_keepalive_if_required()
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
            self._abort("message too large")
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
            self.parser.feed_data(data)
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
                    self.parser.get_method(),
                    self.url,
                    self.parser.get_http_version(),
                    self.headers,
                )
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)
                try:
                    self.parser.feed_data(rest)
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
        self._head.begin()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Handle a part of the URL."""
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.max_head_bytes:
            self._refuse_head()
        super().on_url(url)

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
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Handle the end of the head: the application starts."""
        try:
            method = self.parser.get_method()
            if is_of_other_protocol(self._head_start, self._data, method, self.url):
                raise Refused(OTHER_PROTOCOL)
            self._head.end(method, self.url, self.parser.get_http_version())
        except Refused as refused:
            self._refusal = refused.refusal
            raise
        if self.parser.should_upgrade():
            self._is_upgrade = True  # the parser stops here, see `_try_parse_rest`
            return
        self._in_head = False
        self._head_start.clear()
        self._in_body = True
        self._part_bytes = 0
        self._receiving.stop()
        self._bytes_after_body = 0
        self.expect_100_continue = self._head.expects_continue
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Handle a part of the body. Its time begins anew with enough bytes, in however many
        pieces."""
        self._bytes_after_body = 0
        self._part_bytes += len(body)
        if self._part_bytes >= self._limits.body_part_bytes:
            self._part_bytes = 0
            self._receiving.stop()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of the request."""
        if self._is_upgrade:
            return
        self._in_body = False
        self._is_receiving = False
        self._receiving.stop()
        super().on_message_complete()

    def _refuse_head(self) -> NoReturn:
        """Refuse a head that is too large. Raises inside the parser, which ends the parsing."""
        self._refusal = self._limits.head_too_large()
        raise Refused(self._refusal)

    # -- time to receive --------------------------------------------------------------------

    def _on_receive_timeout(self) -> None:
        if self.flow.read_paused:  # the delay is ours: we do not read
            self._part_bytes = 0
            self._receiving.start(self._limits.body_window_s if self._in_body else None)
        elif self._in_body:
            self._refuse(self._limits.body_too_slow())
        elif self._in_head:
            self._refuse(HEAD_TOO_SLOW)
        else:
            self._abort(HEAD_TOO_SLOW.reason)
