"""The rules of RFC 9112 for a request's head that the parser leaves to its caller.

Two servers must not read a request in different ways: a proxy in front of the router and the router
must agree on where a request ends and on its host. Ambiguous requests are refused. Knows nothing of
connections.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gateway.http.refusals import Refusal, Refused

FRAMING_HEADERS = frozenset((b"host", b"transfer-encoding", b"expect"))
"""The headers, in lower case, that `HeadReader.take` wants to see."""

OTHER_PROTOCOL = Refusal(400, "the request's protocol is not HTTP; use HTTP/1.1")

_RTSP, _ICE = b"RTSP/", b"ICE/"  # protocols that the parser also reads
_HOST = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+,;=:\[\]]*")
_TARGETS = (b"/", b"http://", b"https://")
_WHITESPACE = b" \t"
_CONNECT = Refusal(
    405, "CONNECT is not supported", code="method_not_allowed", headers={"allow": "GET, POST"}
)


class HeadReader:
    """Reads the framing headers of one request after the other. Raises Refused."""

    __slots__ = ("_is_chunked", "_num_hosts", "expects_continue")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the previous request."""
        self.expects_continue = False
        self._is_chunked = False
        self._num_hosts = 0

    def take(self, name: bytes, value: bytes) -> None:
        """Read one of `FRAMING_HEADERS`."""
        if name == b"host":
            self._num_hosts += 1
            if _HOST.fullmatch(value.strip(_WHITESPACE)) is None:
                raise _refused("the Host header is not a host")
        elif name == b"transfer-encoding":
            if self._is_chunked or value.strip(_WHITESPACE).lower() != b"chunked":
                raise _refused("the only Transfer-Encoding that is supported is chunked")
            self._is_chunked = True
        elif value.lower() == b"100-continue":
            self.expects_continue = True

    def end(self, method: bytes, target: bytes, version: str) -> None:
        """Check the whole head."""
        if method == b"CONNECT":
            raise Refused(_CONNECT)
        if not target.startswith(_TARGETS) and (method, target) != (b"OPTIONS", b"*"):
            raise _refused("the request's target is neither a path nor a URL")
        if version == "1.1":
            if self._num_hosts != 1:
                raise _refused(f"an HTTP/1.1 request has one Host header, not {self._num_hosts}")
        elif version != "1.0":
            raise _refused(f"HTTP/{version} is not supported; use HTTP/1.1")
        elif self._num_hosts > 1:
            raise _refused(f"a request has one Host header, not {self._num_hosts}")
        elif self._is_chunked:
            raise _refused("HTTP/1.0 has no Transfer-Encoding")
        else:
            self.expects_continue = False  # HTTP/1.0 clients cannot read a 100 Continue


def is_of_other_protocol(earlier: bytearray, data: bytes, method: bytes, target: bytes) -> bool:
    """Whether a request line in these bytes names one of the parser's other protocols, whose
    requests look like HTTP's.

    The parser does not say where in `data`, or in `earlier` bytes of a head, the request begins.
    So this also refuses a request if one with the same method and target, but of the other
    protocol, is written out in its own bytes.
    """
    whole = earlier + data if earlier else data
    if whole.find(_RTSP) < 0 and whole.find(_ICE) < 0:  # `in` costs four times as much
        return False
    line = rb"%b +%b +(?:RTSP|ICE)/" % (re.escape(method), re.escape(target))
    return re.search(line, whole) is not None


def head_without_upgrade(
    method: bytes, url: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """The head without its `Upgrade` headers, for a new parser. Raises Refused for a value of
    several lines, which the new parser would read differently."""
    lines = [b"%b %b HTTP/%b\r\n" % (method, url, version.encode())]
    for name, value in headers:
        if b"\r" in value or b"\n" in value:
            raise _refused("a header has a value of several lines")
        if name != b"upgrade":
            lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join([*lines, b"\r\n"])


def _refused(message: str) -> Refused:
    return Refused(Refusal(400, message))
