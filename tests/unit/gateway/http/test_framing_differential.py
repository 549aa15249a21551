"""Request framings of many kinds: the server never sees a request that a strict reader does not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from uvicorn import Config
from uvicorn.server import ServerState

from bench.tools.recorded_connection import RecordedConnection
from gateway.http.connection import BoundedProtocol, BoundedProtocols
from gateway.http.connection_limits import ConnectionLimits
from tests.unit.gateway.http.strict_http import Request, read_requests

NUM_FRAMINGS = 600
HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: h\r\n\r\n"

ODD = 0.07  # how often each part of a framing is odd
ODD_LINE_END = 0.01

METHODS = [b"POST", b"GET", b"PUT", b"OPTIONS"]
ODD_METHODS = [b"CONNECT", b"post", b"PO ST", b"", b"POST "]
TARGETS = [b"/a", b"/a?b=c", b"http://x/a"]
ODD_TARGETS = [b"x:80", b"*", b"a", b"", b"/\x80", b"/a b", b"/a\t"]
ODD_VERSIONS = [
    b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.2", b"HTTP/1.10", b"http/1.1", b"HTTP/1", b"",
    b"HTTP/1.1 ", b"HTTP/ 1.1", b"RTSP/1.0", b"RTSP/1.1", b"ICE/1.0",
]  # fmt: skip
ODD_HOSTS = [
    [], [b"host: x", b"host: x"], [b"host: x", b"Host: y"], [b"host:"], [b"host: a b"],
    [b"host : x"], [b"host: x\x00"], [b" host: x"],
]  # fmt: skip
EXTRAS = [[], [], [b"connection: keep-alive"], [b"upgrade: h2c"], [b"expect: 100-continue"]]
ODD_EXTRAS = [
    [b"connection: close"], [b"connection: keep-alive, close"],
    [b"connection: upgrade", b"upgrade: h2c"], [b"connection: upgrade", b"upgrade: websocket"],
    [b"x: a\r\n folded: b"], [b"x"], [b": x"], [b"x: \x01"], [b"x: \xff"], [b"x: a\nhost: y"],
    [b"x: a\rb"], [b"x(y): a"],
]  # fmt: skip
LENGTHS = [[b"content-length: %d"], [b"Content-Length:%d "], [b"content-length: 0%d"]]
ODD_LENGTHS = [
    [b"content-length: +%d"], [b"content-length: -%d"], [b"content-length: 0x%x"],
    [b"content-length: %d", b"content-length: %d"], [b"content-length: %d", b"content-length: 0"],
    [b"content-length: 0", b"content-length: %d"], [b"content-length: %d, %d"],
    [b"content-length: 99999999999999999999%d"], [b"content-length: "], [b"content-length: %d 1"],
    [b"content_length: %d"], [b"content-length : %d"],
]  # fmt: skip
CODINGS = [[b"transfer-encoding: chunked"], [b"Transfer-Encoding:\tChunked "]]
ODD_CODINGS = [
    [b"transfer-encoding: gzip, chunked"], [b"transfer-encoding: chunked, gzip"],
    [b"transfer-encoding: identity"],
    [b"transfer-encoding: chunked", b"transfer-encoding: chunked"],
    [b"transfer-encoding: gzip", b"transfer-encoding: chunked"],
    [b"transfer-encoding: xchunked"], [b"transfer-encoding: chunked;q=1"],
    [b"transfer-encoding : chunked"], [b"transfer-encoding:"], [b"transfer-encoding: \x0bchunked"],
    [b"transfer-encoding: chunked", b"content-length: 3"],
    [b"content-length: 3", b"transfer-encoding: chunked"], [b"transfer_encoding: chunked"],
    [b"transfer-encoding:\r\n chunked"], [b"te: chunked"],
]  # fmt: skip
SIZES = [b"%x", b"0%x", b"%x;a=b", b"%x;a"]
ODD_SIZES = [
    b"%x ;a", b"0x%x", b"+%x", b"-%x", b" %x", b"%x;\n", b"%x;a\rb", b"%xg", b"fffffffffffffffff%x",
    b"", b"%x ",
]  # fmt: skip
ODD_CHUNK_ENDS = [b"\n", b"", b"\r", b"x\r\n"]
ODD_LINE_ENDS = [b"\n", b"\r", b"\r\r\n", b"\n\r\n"]
ENDS = [
    b"0\r\n\r\n", b"00\r\n\r\n", b"0\r\nhost: y\r\n\r\n", b"0;a\r\n\r\n",
    b"0\r\ntransfer-encoding: gzip\r\nconnection: close\r\nx: y\r\n\r\n",
]  # fmt: skip
ODD_ENDS = [
    b"0\n\n", b"0\r\n\n", b"0\r\nx\r\n\r\n", b"0\r\n", b"0\r\n \r\n",
    b"0\r\ncontent-length: 9\r\n\r\n",
]  # fmt: skip


def framing(seed: int) -> bytes:
    """One or two requests, perhaps with a request hidden in a body, and another one behind."""
    rng = random.Random(seed)
    data = _pick(rng, [b"", b"\r\n"], [b"\n", b"\r", b" "])
    for _ in range(rng.choice([1, 1, 2])):
        body = rng.choice([b"", b"abc", HIDDEN, HIDDEN])
        framing_lines, sent = _body(rng, body)
        method, target = _pick(rng, METHODS, ODD_METHODS), _pick(rng, TARGETS, ODD_TARGETS)
        request_line = b" ".join([method, target, _pick(rng, [b"HTTP/1.1"], ODD_VERSIONS)])
        extras = _pick(rng, EXTRAS, ODD_EXTRAS)
        lines = [*_pick(rng, [[b"host: x"]], ODD_HOSTS), *extras, *framing_lines]
        rng.shuffle(lines)
        data += b"".join(line + _line_end(rng) for line in (request_line, *lines, b"")) + sent
    return data + b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def _pick(rng: random.Random, usual: list, odd: list):
    return rng.choice(odd if rng.random() < ODD else usual)


def _line_end(rng: random.Random) -> bytes:
    return rng.choice(ODD_LINE_ENDS) if rng.random() < ODD_LINE_END else b"\r\n"


def _filled(text: bytes, size: int) -> bytes:
    return text.replace(b"%d", b"%d" % size).replace(b"%x", b"%x" % size)


def _body(rng: random.Random, body: bytes) -> tuple[list[bytes], bytes]:
    """The header lines that frame a body, and the body as sent."""
    kind = rng.choice(["none", "length", "length", "chunked", "chunked", "chunked"])
    if kind == "none":
        return [], _pick(rng, [b""], [body])
    if kind == "length":
        lines = _pick(rng, LENGTHS, ODD_LENGTHS)
        return [_filled(line, len(body)) for line in lines], body
    sent = b""
    for part in (body[:3], body[3:]):
        if part:
            size = _filled(_pick(rng, SIZES, ODD_SIZES), len(part))
            sent += size + _line_end(rng) + part + _pick(rng, [b"\r\n"], ODD_CHUNK_ENDS)
    return _pick(rng, CODINGS, ODD_CODINGS), sent + _pick(rng, ENDS, ODD_ENDS)


class Recorder:
    """An application that answers 200 to every request that it gets whole."""

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.num_begun = 0

    async def __call__(self, scope, receive, send) -> None:
        self.num_begun += 1
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        self.seen.append(Request(scope["method"], scope["raw_path"], body))
        await send({"type": "http.response.start", "status": 200,
                    "headers": [(b"content-length", b"0")]})  # fmt: skip
        await send({"type": "http.response.body", "body": b""})


async def converse(data: bytes, parts: Iterator[bytes]) -> tuple[Recorder, bytes]:
    """What the application saw, and the server's answers."""
    app, wire, state = Recorder(), RecordedConnection(), ServerState()
    config = Config(app, ws="none", lifespan="off", log_config=None, proxy_headers=False)
    config.load()
    make = BoundedProtocols(ConnectionLimits(), CollectorRegistry()).factory()
    protocol: BoundedProtocol = make(config=config, server_state=state, app_state={})
    protocol.connection_made(wire)
    for part in parts:
        if wire.is_closed:
            break
        protocol.data_received(part)
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    if state.tasks:
        await asyncio.wait(list(state.tasks))
    return app, wire.written


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def paths(requests: list[Request]) -> list[tuple[str, bytes, bytes]]:
    """Requests with the path of their target, as an application sees it."""
    found = []
    for each in requests:
        path = each.target.partition(b"?")[0]
        if path.startswith(b"http://x"):
            path = path.removeprefix(b"http://x")
        found.append((each.method, path, each.body))
    return found


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_no_framing_shows_more_requests_than_a_strict_reader_sees(size: int) -> None:
    print(f"seeds 0 to {NUM_FRAMINGS - 1}, in parts of {size} bytes")
    for seed in range(NUM_FRAMINGS):
        data = framing(seed)
        expected = read_requests(data)
        app, written = await converse(data, pieces(data, size))
        about = f"seed {seed}: {data!r}\nanswered {written!r}"
        right, seen = paths(expected.requests), paths(app.seen)
        assert seen == right[: len(seen)], about
        assert written.count(b"HTTP/1.1 200 OK") <= len(right), about
        assert app.num_begun <= len(right) + 1, about
        assert b"HTTP/1.1 5" not in written, about
        assert seen == right, about


def test_the_framings_are_of_both_kinds() -> None:
    readings = [read_requests(framing(seed)) for seed in range(NUM_FRAMINGS)]
    refused = sum(each.is_refused for each in readings)
    assert NUM_FRAMINGS / 5 < refused < NUM_FRAMINGS * 19 / 20
    assert sum(not each.is_refused and len(each.requests) > 1 for each in readings) > 20
