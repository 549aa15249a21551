"""A strict reader of HTTP/1.x requests after RFC 9112, as a reference for tests.

It accepts only what two servers cannot read differently. Everything else ends the reading: nothing
behind it may count as a request. Of the liberties that section 2.2 and 3 leave to recipients it
takes two, which move no border between requests: line breaks before a request line are skipped,
and several spaces may separate method and target.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rb"([A-Z]+) +(/[!-~]*|\*|https?://[!-~]+) HTTP/(1\.[01])")
_HEADER = re.compile(rb"(%b):[ \t]*([\t -~\x80-\xff]*?)[ \t]*" % _TOKEN)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(;[\t -~\x80-\xff]*)?")
_HOST = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+,;=:\[\]]*")


class BadRequest(Exception):
    """The request must be refused."""


class Incomplete(Exception):
    """The bytes end within a request."""


@dataclass(frozen=True)
class Request:
    method: str
    target: bytes
    body: bytes


@dataclass
class Reading:
    """The requests in some bytes, and whether something that must be refused follows them."""

    requests: list[Request] = field(default_factory=list)
    is_refused: bool = False


def read_requests(data: bytes) -> Reading:
    """All requests up to the first that is refused, is incomplete or closes the connection."""
    reading, reader = Reading(), _Reader(data)
    try:
        while True:
            request, is_last = reader.request()
            reading.requests.append(request)
            if is_last:
                return reading
    except BadRequest:
        reading.is_refused = True
    except Incomplete:
        pass
    return reading


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def request(self) -> tuple[Request, bool]:
        while self._data[self._at : self._at + 1] in (b"\r", b"\n"):
            self._at += 1
        match = _REQUEST_LINE.fullmatch(self._line())
        if match is None or match[1] == b"CONNECT" or (match[2] == b"*" and match[1] != b"OPTIONS"):
            raise BadRequest
        version, headers = match[3], self._headers()
        hosts = headers.get(b"host", [])
        if len(hosts) > 1 or (version == b"1.1" and not hosts):
            raise BadRequest
        if hosts and _HOST.fullmatch(hosts[0]) is None:
            raise BadRequest
        body = self._body(version, headers)
        options = b",".join(headers.get(b"connection", [])).lower().split(b",")
        is_last = version == b"1.0" or b"close" in [each.strip() for each in options]
        return Request(match[1].decode(), match[2], body), is_last

    def _headers(self) -> dict[bytes, list[bytes]]:
        found: dict[bytes, list[bytes]] = {}
        while line := self._line():
            match = _HEADER.fullmatch(line)
            if match is None:
                raise BadRequest
            found.setdefault(match[1].lower(), []).append(match[2])
        return found

    def _body(self, version: bytes, headers: dict[bytes, list[bytes]]) -> bytes:
        codings = headers.get(b"transfer-encoding", [])
        lengths = headers.get(b"content-length", [])
        if codings:
            if version == b"1.0" or lengths or [each.lower() for each in codings] != [b"chunked"]:
                raise BadRequest
            return self._chunks()
        if not lengths:
            return b""
        if len(lengths) > 1 or re.fullmatch(rb"[0-9]{1,18}", lengths[0]) is None:
            raise BadRequest
        return self._exactly(int(lengths[0]))

    def _chunks(self) -> bytes:
        body = b""
        while True:
            match = _CHUNK.fullmatch(self._line())
            if match is None:
                raise BadRequest
            size = int(match[1], 16)
            if size == 0:
                if self._headers().keys() & {b"transfer-encoding", b"content-length"}:  # trailers
                    raise BadRequest
                return body
            body += self._exactly(size)
            if self._exactly(2) != b"\r\n":
                raise BadRequest

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise Incomplete
        line, self._at = self._data[self._at : end], end + 1
        if not line.endswith(b"\r"):
            raise BadRequest
        return line[:-1]

    def _exactly(self, size: int) -> bytes:
        if len(self._data) - self._at < size:
            raise Incomplete
        self._at += size
        return self._data[self._at - size : self._at]
