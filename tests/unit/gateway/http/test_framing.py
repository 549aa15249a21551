"""Wrong or ambiguous framing is refused; trailers and upgrades change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re

import pytest

from gateway.http.refusals import LOG_INTERVAL_S, RefusalLog
from protocol.messages import FinishReason
from router.requests.interface import TokenDelta
from tests.unit.gateway.api_harness import Pause
from tests.unit.gateway.served_http import SOON_S, Serve, Served, completion

HIDDEN = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
CLOSE = b"connection: close\r\n"


def chunked(trailers: bytes = b"", headers: bytes = CLOSE) -> bytes:
    head, _, body = completion(max_tokens=1).partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
    start = b"\r\n".join([*lines, b"transfer-encoding: chunked", headers]) + b"\r\n"
    return start + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)


async def exchange(served: Served, *parts: bytes) -> bytes:
    """All that the server answers to these bytes, which arrive part by part, until it closes the
    connection."""
    client = await served.connect()
    for part in parts:
        await served.send(client, part)
        await asyncio.sleep(0.01)  # or the kernel may join the parts
    found = await served.read_all(client)
    client.close()
    await served.until_nothing_is_left()
    return found


async def answers(served: Served, *parts: bytes) -> list[bytes]:
    """The status lines of all answers to these bytes; the server must close the connection."""
    return re.findall(rb"HTTP/1\.1 [^\r]*", await exchange(served, *parts))


async def refusal(served: Served, *parts: bytes) -> tuple[int, dict]:
    """The status and error of the only answer to these bytes."""
    head, _, body = (await exchange(served, *parts)).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head[9:12]), json.loads(body)["error"]


async def test_trailers_are_dropped(serve: Serve) -> None:
    served = await serve()
    served.tokens(1)
    seen = []
    inner = served.server.config.loaded_app

    async def spy(scope, receive, send) -> None:
        await inner(scope, receive, send)
        seen.append(dict(scope["headers"]))

    served.server.config.loaded_app = spy
    request = chunked(b"x-api-key: secret\r\nauthorization: Bearer key\r\nhost: other\r\n")
    assert await answers(served, request) == [b"HTTP/1.1 200 OK"]
    (headers,) = seen
    assert headers[b"host"] == b"x"
    assert not headers.keys() & {b"x-api-key", b"authorization"}


@pytest.mark.parametrize("size", [700, 10**6])
@pytest.mark.parametrize("trailer", [b"a: " + b"x" * 10_000, b"a: b\r\n" * 2000, b"n" * 10_000])
async def test_trailers_count_as_head(serve: Serve, trailer: bytes, size: int) -> None:
    served = await serve()
    request = chunked(trailer)
    end = request.index(trailer)
    parts = [request[:end], *(trailer[at : at + size] for at in range(0, len(trailer), size))]
    client = await served.connect()
    for part in parts:
        await served.send(client, part)
        await asyncio.sleep(0.001)
        if served.cuts("head too large"):
            break
    await served.until(lambda: served.cuts("head too large") == 1)
    answer = await served.read_all(client)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    client.close()
    await served.until_nothing_is_left()


async def test_a_body_in_many_small_chunks_is_no_head(serve: Serve) -> None:
    served = await serve()
    served.tokens(1)
    head, _, body = completion({"prompt": "x" * 1000}, max_tokens=1).partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
    start = b"\r\n".join([*lines, b"transfer-encoding: chunked", CLOSE]) + b"\r\n"
    parts = [start]
    for at in range(0, len(body), 4):
        part = body[at : at + 4]
        parts += [b"%x;note=short\r\n" % len(part), part + b"\r\n"]
    client = await served.connect()
    for part in [*parts, b"0\r\n\r\n"]:
        await served.send(client, part)
        await asyncio.sleep(0.0005)
    assert (await served.read_all(client)).startswith(b"HTTP/1.1 200 OK")
    client.close()


async def test_connect_is_not_allowed_and_its_body_is_no_request(serve: Serve) -> None:
    served = await serve()
    head = b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(HIDDEN)
    assert await answers(served, head + HIDDEN) == [b"HTTP/1.1 405 Method Not Allowed"]
    status, error = await refusal(served, head)
    assert (status, error["code"]) == (405, "method_not_allowed")


UPGRADE = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"


@pytest.mark.parametrize("is_split", [False, True])
async def test_upgrade_is_ignored_and_the_body_is_a_body(serve: Serve, is_split: bool) -> None:
    served = await serve()
    served.tokens(1)
    right = completion(max_tokens=1).replace(b"host: x\r\n", b"host: x\r\n" + UPGRADE, 1)
    wrong = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"content-type: "
        b"application/json\r\ncontent-length: %d\r\n\r\n" % len(HIDDEN)
    ) + HIDDEN
    last = b"GET /nowhere HTTP/1.1\r\nhost: x\r\n" + UPGRADE + CLOSE + b"\r\n"
    requests = right + last.replace(CLOSE, b"") + wrong + last
    size = 11 if is_split else len(requests)
    parts = [requests[at : at + size] for at in range(0, len(requests), size)]
    assert await answers(served, *parts) == [
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 404 Not Found",
        b"HTTP/1.1 400 Bad Request",
        b"HTTP/1.1 404 Not Found",
    ]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /live HTTP/1.1\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: a/b@c\r\n\r\n",
        b"GET /live HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /live HTTP/2.0\r\nhost: a\r\n\r\n",
        b"GET /live HTTP/0.9\r\nhost: a\r\n\r\n",
        b"GET /live\r\n\r\n",
        b"POST /live HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /live HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        b"POST /live HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /live HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n0\r\n\r\n",
        b"POST /live HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /live HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n"
        b"\r\n0\r\n\r\n",
    ],
)
async def test_an_ambiguous_head_is_refused(serve: Serve, request_bytes: bytes) -> None:
    served = await serve()
    status, error = await refusal(served, request_bytes)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert served.cuts("malformed request") == 1


WITH_RTSP = b"GET /live RTSP/1.1\r\nhost: a\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        WITH_RTSP,
        b"\r\n" + WITH_RTSP.replace(b"1.1", b"1.0"),
        WITH_RTSP.replace(b"/live ", b"http://a/live  "),
        WITH_RTSP.replace(b"host", b"connection: upgrade\r\nupgrade: h2c\r\nhost"),
        WITH_RTSP.replace(b"GET", b"OPTIONS"),
        WITH_RTSP.replace(b"GET", b"DESCRIBE"),
        b"SOURCE /live ICE/1.0\r\nhost: a\r\n\r\n",
    ],
)
@pytest.mark.parametrize("size", [1, 12, 13, 1000])
async def test_another_protocol_is_refused(serve: Serve, data: bytes, size: int) -> None:
    served = await serve()
    status, error = await refusal(
        served, *(data[at : at + size] for at in range(0, len(data), size))
    )
    assert status == 400
    assert "HTTP/1.1" in error["message"]


@pytest.mark.parametrize("cut", range(len("GET /live "), len("GET /live RTSP/1.1\r\n")))
async def test_another_protocol_is_refused_wherever_its_name_is_cut(serve: Serve, cut: int) -> None:
    served = await serve()
    status, error = await refusal(served, WITH_RTSP[:cut], WITH_RTSP[cut:])
    assert status == 400
    assert "HTTP/1.1" in error["message"]


async def test_another_protocol_right_behind_a_body_is_refused(serve: Serve) -> None:
    served = await serve()
    served.tokens(1)
    found = await answers(served, completion(max_tokens=1) + WITH_RTSP)
    assert found == [b"HTTP/1.1 200 OK", b"HTTP/1.1 400 Bad Request"]


async def test_the_name_of_another_protocol_elsewhere_is_no_protocol(serve: Serve) -> None:
    served = await serve()
    served.tokens(1)
    head = b"GET /live?x=RTSP/1.1 HTTP/1.1\r\nhost: a\r\nx: RTSP/1.1 GET / RTSP/1.1\r\n\r\n"
    body = completion({"prompt": "POST / RTSP/1.1"}, max_tokens=1)
    last = b"GET /live HTTP/1.1\r\nhost: a\r\n" + CLOSE + b"\r\n"
    assert await answers(served, head + body + last) == [b"HTTP/1.1 200 OK"] * 3


MALFORMED_CHUNKS = chunked().replace(CLOSE, b"").partition(b"\r\n\r\n")[0] + b"\r\n\r\nxyz\r\n"


@pytest.mark.parametrize(
    ("malformed", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\n\r\n", 400),
        (MALFORMED_CHUNKS, 400),
        (b"GET /live HTTP/1.1\r\nhost: a\r\nx: " + b"x" * 10_000, 431),
        (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", 405),
    ],
    ids=["line", "host", "chunk", "head", "connect"],
)
@pytest.mark.parametrize("is_split", [False, True])
async def test_answers_to_the_requests_before_a_malformed_one_are_sent_whole(
    serve: Serve, malformed: bytes, status: int, is_split: bool
) -> None:
    served = await serve()
    served.tokens(30)
    stream = completion(max_tokens=30, stream=True)
    last = HIDDEN  # behind the malformed one: never read as a request
    if is_split:
        found = await exchange(served, stream, completion(max_tokens=30) + malformed[:-4],
                               malformed[-4:], last)  # fmt: skip
    else:
        found = await exchange(served, stream + completion(max_tokens=30) + malformed + last)
    statuses = [int(each) for each in re.findall(rb"HTTP/1\.1 (\d+)", found)]
    assert statuses == [200, 200, status]
    first, second, refused = re.split(rb"(?=HTTP/1\.1 \d)", found)[1:]
    assert first.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert json.loads(second.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 30
    assert b"connection: close" in refused
    assert served.cuts("head too large" if status == 431 else "malformed request") == 1


async def test_a_refusal_loses_no_answers_that_a_client_who_still_sends_has_not_read(
    serve: Serve,
) -> None:
    """They lie in the buffers of the server's kernel, which a close at once would drop."""
    served = await serve()
    served.tokens(60)
    client = await served.connect()
    await served.send(client, completion(max_tokens=60, stream=True))
    await served.until(lambda: served.statuses(200) == 1)
    await served.send(client, b"nonsense\r\n\r\n")
    await served.until(lambda: served.cuts("malformed request") == 1)
    with contextlib.suppress(ConnectionError):
        await served.send(client, HIDDEN)
    found = await served.read_all(client)
    first, refused = re.split(rb"(?=HTTP/1\.1 \d)", found)[1:]
    assert first.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 400 ")
    client.close()
    await served.until_nothing_is_left()


async def test_a_client_that_reads_its_refusal_and_stays_is_left(serve: Serve) -> None:
    """Also if it was slow meanwhile: catching up does not stop the timer."""
    served = await serve(stall_timeout_s=SOON_S)
    served.tokens(3)
    client = await served.connect()
    await served.send(client, completion(max_tokens=3) + b"nonsense\r\n\r\n")
    await served.until(lambda: served.cuts("malformed request") == 1 and served.statuses(200) == 1)
    for connection in served.server.server_state.connections:
        connection.pause_writing()
        connection.resume_writing()
    await served.until_nothing_is_left()
    client.close()


async def test_time_to_read_former_answers_ends_no_answer_that_is_being_made(serve: Serve) -> None:
    served = await serve()
    pause = Pause()
    last = TokenDelta([70], finish=FinishReason.LENGTH)
    served.generator.script = lambda request: [TokenDelta([70]), pause, last]
    client = await served.connect()
    await served.send(client, completion(max_tokens=2, stream=True) + b"nonsense\r\n\r\n")
    await served.until(lambda: served.cuts("malformed request") == 1)
    for connection in served.server.server_state.connections:
        connection._on_stall_timeout()
    pause.end()
    found = await served.read_all(client)
    assert re.findall(rb"HTTP/1\.1 (\d+)", found) == [b"200", b"400"]
    client.close()
    await served.until_nothing_is_left()


async def test_a_client_that_leaves_before_its_refusal_leaves_nothing(serve: Serve) -> None:
    served = await serve()
    client = await served.connect()
    await served.send(client, completion(max_tokens=10**6, stream=True) + b"nonsense\r\n\r\n")
    await served.until(lambda: served.cuts("malformed request") == 1)
    client.close()
    await served.until_nothing_is_left()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_plain_request_of_either_version_is_served(serve: Serve, version: bytes) -> None:
    served = await serve()
    host = b"" if version == b"1.0" else b"host: [::1]:8000\r\n"
    request = b"GET /live HTTP/" + version + b"\r\n" + host + CLOSE + b"\r\n"
    assert await answers(served, request) == [b"HTTP/1.1 200 OK"]


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("chunk", [b"xyz\r\n", b"5\r\nhello!\r\n", b"-1\r\n", b"5\nhello\r\n"])
async def test_a_malformed_chunk_is_answered_400(serve: Serve, chunk: bytes, is_split) -> None:
    served = await serve()
    request = chunked()
    at = request.index(b"\r\n\r\n") + 4
    parts = (request[:at], chunk) if is_split else (request[:at] + chunk,)
    status, error = await refusal(served, *parts)
    assert (status, error["type"]) == (400, "invalid_request_error")


def test_refusals_are_logged_at_most_once_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    refusals = RefusalLog(logging.getLogger("test"), lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            refusals.note(("1.2.3.4", 5), "first")
        now += LOG_INTERVAL_S
        refusals.note(("1.2.3.4", 5), "last")
    first, last = [record.getMessage() for record in caplog.records]
    assert "refused 1 malformed" in first
    assert "refused 50 malformed" in last
    assert "1.2.3.4" in last
    assert last.endswith("last")


async def test_a_flood_of_malformed_requests_is_one_line(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    for _ in range(20):
        await refusal(served, b"nonsense\r\n\r\n")
    assert served.cuts("malformed request") == 20
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) <= 3
