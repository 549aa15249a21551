"""What a client cannot do to the HTTP server: flood it, dawdle, or leave its answers unread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from prometheus_client import CollectorRegistry

from protocol.errors import ConfigError
from protocol.messages import FinishReason
from router.api.context import ApiLimits
from router.app import AppOptions, create_app
from router.generation import ServedModel, TokenDelta
from router.http_protocol import (
    WRITE_BUFFER_BYTES,
    BoundedProtocol,
    BoundedProtocols,
    ConnectionLimits,
)
from router.http_server import Doorway, HttpServer, TlsFiles, listen, url_of
from router.request_scope import RequestRecord
from router.tokenizer import Tokenizer
from tests.unit.router.api_harness import MODEL, Forever, ScriptedGenerator

WAIT_S = 30.0
SOON_S = 0.3
KERNEL_BYTES = 16 * 1024
MAX_BODY_BYTES = 20_000
COMPLETIONS = "/v1/completions"


class Served:
    """A server on the test's own loop, over a scripted generator."""

    def __init__(self, checkpoint: Path, tokenizer: Tokenizer, **limits) -> None:
        self.num_produced = 0
        self.generator = ScriptedGenerator(lambda request: self._count(itertools.count()))
        self.registry = CollectorRegistry()
        model = ServedModel(MODEL, checkpoint, lambda: 10**9, created=0)
        options = AppOptions(limits=ApiLimits(max_body_bytes=MAX_BODY_BYTES))
        app = create_app(self.generator, tokenizer, model, self.registry, lambda: None, options)
        known = {"max_head_bytes": 2000, "max_body_bytes": MAX_BODY_BYTES}
        self.protocols = BoundedProtocols(ConnectionLimits(**(known | limits)), self.registry)
        self.listener = listen("127.0.0.1", 0)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        self.server = HttpServer(app, Doorway(self.protocols), 1.0, lambda: None, lambda: None)

    def _count(self, steps):
        for _ in steps:
            self.num_produced += 1
            yield TokenDelta([70])

    def tokens(self, count: int) -> None:
        """From now on a generation has `count` tokens."""
        self.generator.script = lambda request: itertools.chain(
            self._count(range(count - 1)), [TokenDelta([70], finish=FinishReason.LENGTH)]
        )

    async def connect(self) -> socket.socket:
        """A client that reads nothing by itself, with the smallest of buffers."""
        client = socket.socket()
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, self.listener.getsockname())
        return client

    async def send(self, client: socket.socket, data: bytes) -> None:
        async with asyncio.timeout(WAIT_S):
            await asyncio.get_running_loop().sock_sendall(client, data)

    async def read_all(self, client: socket.socket) -> bytes:
        """Everything until the server closes."""
        found = bytearray()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionResetError):
                while part := await loop.sock_recv(client, 65536):
                    found += part
        return bytes(found)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"baton_http_{name}", labels) or 0.0

    def cuts(self, reason: str) -> float:
        return self.metric("connections_cut_total", reason=reason)

    def statuses(self, status: int) -> float:
        return self.metric("requests_total", endpoint=COMPLETIONS, status=str(status))

    async def until(self, condition) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def until_nothing_is_left(self) -> None:
        state = self.server.server_state
        await self.until(lambda: not state.connections and not state.tasks)
        self.generator.wait_idle()
        assert self.metric("requests_in_flight", endpoint=COMPLETIONS) == 0


@pytest.fixture
async def serve(checkpoint: Path, tokenizer: Tokenizer) -> AsyncIterator:
    async with contextlib.AsyncExitStack() as stack:

        async def start(**limits) -> Served:
            served = Served(checkpoint, tokenizer, **limits)
            stack.callback(served.listener.close)
            stop = asyncio.Event()
            task = asyncio.create_task(served.server.serve_until(stop, served.listener))

            async def end() -> None:
                stop.set()
                await task

            stack.push_async_callback(end)
            await served.until(lambda: served.server.started)
            return served

        yield start


def completion(body: dict | None = None, **fields) -> bytes:
    content = json.dumps({"model": MODEL, "prompt": "Hi", **(body or {}), **fields}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(content)
    ) + content


# -- answers that are not read ------------------------------------------------------------------


async def test_a_client_that_stops_reading_is_paused_then_cut_everywhere(serve) -> None:
    served = await serve(stall_timeout_s=SOON_S)
    client = await served.connect()
    await served.send(client, completion(stream=True, max_tokens=10**8))
    await served.until(lambda: served.server.server_state.connections)
    (connection,) = served.server.server_state.connections
    await served.until(lambda: connection.flow.write_paused)
    assert connection.transport.get_write_buffer_size() < WRITE_BUFFER_BYTES + 1000
    await served.until_nothing_is_left()
    assert served.cuts("answer not read in time") == 1
    assert served.statuses(499) == 1
    received = await served.read_all(client)
    per_event = len(received) / received.count(b"data: ")
    in_kernel = 2 * (KERNEL_BYTES + 4096) + 2 * 65536
    assert served.num_produced * per_event < WRITE_BUFFER_BYTES + in_kernel
    client.close()


async def test_a_client_that_reads_on_in_time_loses_nothing(serve) -> None:
    served = await serve()
    served.tokens(3000)
    client = await served.connect()
    await served.send(client, completion(stream=True, max_tokens=3000))
    await served.until(lambda: served.server.server_state.connections)
    (connection,) = served.server.server_state.connections
    await served.until(lambda: connection.flow.write_paused)
    assert served.num_produced < 2999
    received = b""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_S):
        while b"[DONE]" not in received[-100:]:
            received += await loop.sock_recv(client, 65536)
    assert received.count(b'"text":') == 3000
    client.close()
    await served.until_nothing_is_left()
    assert served.cuts("answer not read in time") == 0


@pytest.mark.parametrize("keep_alive", [True, False])
@pytest.mark.parametrize("write_buffer", [WRITE_BUFFER_BYTES, 10**7])
async def test_an_answer_that_is_whole_but_not_read_does_not_stay(
    serve, monkeypatch: pytest.MonkeyPatch, keep_alive: bool, write_buffer: int
) -> None:
    """Whether or not what is left of it fills the buffer."""
    monkeypatch.setattr("router.http_protocol.WRITE_BUFFER_BYTES", write_buffer)
    served = await serve(stall_timeout_s=SOON_S)
    large = TokenDelta([70] * 100_000, finish=FinishReason.LENGTH)
    served.generator.script = lambda request: [large]
    client = await served.connect()
    request = completion(max_tokens=100_000, return_token_ids=True)
    if not keep_alive:
        request = request.replace(b"host: x", b"host: x\r\nconnection: close")
    await served.send(client, request)
    await served.until(lambda: served.cuts("answer not read in time") == 1)
    await served.until_nothing_is_left()
    assert served.statuses(200) == 1
    client.close()


async def test_the_time_to_read_an_answer_is_not_that_of_the_next_one(
    serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client reads to the end, but what was left of it never filled the buffer."""
    monkeypatch.setattr("router.http_protocol.WRITE_BUFFER_BYTES", 10**7)
    served = await serve()
    large = TokenDelta([70] * 100_000, finish=FinishReason.LENGTH)
    served.generator.script = lambda request: [large]
    client = await served.connect()
    await served.send(client, completion(max_tokens=100_000, return_token_ids=True))
    await served.until(lambda: served.statuses(200) == 1)
    (connection,) = served.server.server_state.connections
    assert connection._stall_timer is not None, "the answer is whole, and was not read"
    answer, loop = b"", asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_S):
        while not answer.endswith(b'"text_completion"}'):
            answer += await loop.sock_recv(client, 65536)
    served.generator.script = lambda request: [Forever()]
    await served.send(client, completion(stream=True))
    await served.until(lambda: served.metric("requests_in_flight", endpoint=COMPLETIONS) == 1)
    assert connection._stall_timer is None
    client.close()
    await served.until_nothing_is_left()
    assert served.cuts("answer not read in time") == 0


# -- requests that are too much -----------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models HTTP/1.1\r\nlong: " + b"x" * 2100 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nnever-ends: " + b"x" * 5000,
        b"GET /v1/models HTTP/1.1\r\n" + b"a: b\r\n" * 1100,
        b"GET /" + b"x" * 2100 + b" HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"n" * 5000,
    ],
)
@pytest.mark.parametrize("size", [500, 10**6])
async def test_a_head_that_is_too_large_is_refused(serve, head: bytes, size: int) -> None:
    served = await serve()
    client = await served.connect()
    with contextlib.suppress(ConnectionError):
        for at in range(0, len(head), size):
            await served.send(client, head[at : at + size])
            await asyncio.sleep(0)
        while not served.cuts("head too large"):
            await served.send(client, b"x" * 3000)
            await asyncio.sleep(0)
    await served.until(lambda: served.cuts("head too large") == 1)
    await served.until_nothing_is_left()
    answer = await served.read_all(client)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    client.close()


async def test_a_refusal_of_a_head_is_json(serve) -> None:
    served = await serve()
    async with httpx.AsyncClient(base_url=url_of(served.listener)) as client:
        answer = await client.get("/v1/models", headers={"x-long": "x" * 2100})
        assert answer.status_code == 431
        assert "2000 bytes" in answer.json()["error"]["message"]
        assert (await client.get("/v1/models", headers={"x-long": "x" * 1000})).status_code == 200
        for _ in range(5):  # each request counts for itself
            assert (
                await client.get("/v1/models", headers={"x-long": "x" * 900})
            ).status_code == 200


async def test_what_is_not_http_is_answered_400(serve) -> None:
    served = await serve()
    client = await served.connect()
    await served.send(client, b"\x16\x03\x01 this is not HTTP\r\n\r\n")
    answer = await served.read_all(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    client.close()
    await served.until_nothing_is_left()


async def test_garbage_behind_a_request_ends_its_answer(serve) -> None:
    served = await serve()
    client = await served.connect()
    await served.send(client, completion(stream=True, max_tokens=10**8) + b"\x00garbage\r\n\r\n")
    await served.until(lambda: served.cuts("malformed request") == 1)
    await served.until_nothing_is_left()
    client.close()


async def test_a_body_without_end_is_answered_then_cut(serve) -> None:
    served = await serve()
    client = await served.connect()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    await served.send(client, head)
    chunk = b"2000\r\n" + b"x" * 0x2000 + b"\r\n"
    with contextlib.suppress(ConnectionError):
        for _ in range(10_000):
            await served.send(client, chunk)
        pytest.fail("80 MB were taken")
    await served.until(lambda: served.cuts("message too large") == 1)
    assert served.statuses(413) == 1
    await served.until_nothing_is_left()
    client.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_with_requests_behind_its_first_is_no_error_of_ours(
    serve, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    client = await served.connect()
    await served.send(client, completion(stream=stream, max_tokens=10**8) + completion())
    await served.until(lambda: served.num_produced > 0)
    client.close()
    await served.until_nothing_is_left()
    gc.collect()
    assert served.statuses(499) == 1
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


async def test_mutated_requests_never_break_the_server(serve) -> None:
    """Bytes removed, added and changed anywhere, in parts of any size; then the client leaves."""
    served = await serve()
    served.tokens(3)
    rng = random.Random(11)
    right = completion(max_tokens=3) + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    for _ in range(300):
        mutated = bytearray(right)
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(mutated))
            mutated[at : at + rng.choice([0, 1, 1, 20])] = rng.randbytes(rng.choice([0, 1, 1, 8]))
        client = await served.connect()
        with contextlib.suppress(ConnectionError):
            size = rng.choice([7, 100, 10_000])
            for start in range(0, len(mutated), size):
                await served.send(client, bytes(mutated[start : start + size]))
        client.close()
    await served.until_nothing_is_left()
    assert served.statuses(500) == 0
    async with httpx.AsyncClient(base_url=url_of(served.listener)) as client:
        assert (await client.get("/v1/models")).status_code == 200


# -- requests that take their time --------------------------------------------------------------


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"\r\n",
        b"GET /v1/mod",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n",
        completion()[:-5],
    ],
)
async def test_a_request_that_does_not_come_whole_is_cut(serve, begun: bytes) -> None:
    served = await serve(receive_timeout_s=SOON_S)
    client = await served.connect()
    await served.send(client, begun)
    assert await served.read_all(client) == b""
    await served.until(lambda: served.cuts("request not received in time") == 1)
    await served.until_nothing_is_left()
    has_body = begun.startswith(b"POST")
    assert served.statuses(499) == has_body
    assert served.metric("requests_total", endpoint=COMPLETIONS, status="500") == 0
    client.close()


async def test_an_idle_connection_that_sends_line_breaks_is_cut(serve) -> None:
    """They end uvicorn's keep-alive time, but begin no request."""
    served = await serve(receive_timeout_s=SOON_S)
    client = await served.connect()
    await served.send(client, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    loop = asyncio.get_running_loop()
    assert (await loop.sock_recv(client, 65536)).startswith(b"HTTP/1.1 200 ")
    await served.send(client, b"\r\n")
    await served.read_all(client)
    assert served.cuts("request not received in time") == 1
    client.close()


async def test_the_time_to_receive_does_not_limit_the_answer(serve) -> None:
    served = await serve(receive_timeout_s=SOON_S)
    served.generator.script = lambda request: self_paced
    release = asyncio.Event()

    async def until_released():
        await release.wait()

    self_paced = [TokenDelta([70]), TokenDelta([71], finish=FinishReason.LENGTH)]
    original = served.generator.generate

    async def slow(request, sink):
        await until_released()
        await original(request, sink)

    served.generator.generate = slow
    client, slow_client = await served.connect(), await served.connect()
    await served.send(client, completion(max_tokens=2))
    await served.read_all(slow_client)  # cut for its silence: so the time has passed
    release.set()
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_S):
        assert (await loop.sock_recv(client, 65536)).startswith(b"HTTP/1.1 200 ")
    client.close()
    slow_client.close()


# -- TLS ----------------------------------------------------------------------------------------


async def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(cert, append=True)
    certificate.private_key_pem.write_to_path(key)

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["scheme"].encode()})

    tls = TlsFiles(str(cert), str(key))
    doorway = Doorway(BoundedProtocols(ConnectionLimits(), CollectorRegistry()), tls)
    server = HttpServer(app, doorway, 1.0, lambda: None, lambda: None)
    stop, listener = asyncio.Event(), listen("127.0.0.1", 0)
    task = asyncio.create_task(server.serve_until(stop, listener))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    url = url_of(listener, tls)
    assert url.startswith("https://127.0.0.1:")
    async with httpx.AsyncClient(verify=trusting) as client:
        assert (await client.get(url)).text == "https"
    async with httpx.AsyncClient(verify=ssl.create_default_context()) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
    stop.set()
    await task
    listener.close()


def test_wrong_tls_files_are_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("no certificate")
    for cert in (tmp_path / "cert", tmp_path / "missing"):
        doorway = Doorway(
            BoundedProtocols(ConnectionLimits(), CollectorRegistry()), TlsFiles(str(cert))
        )
        with pytest.raises(ConfigError, match=f"TLS with {cert}"):
            HttpServer(lambda *args: None, doorway, 1.0, lambda: None, lambda: None)


# -- what is left of connections ----------------------------------------------------------------


@pytest.fixture
def num_new() -> Iterator[Callable[[], int]]:
    """How many connections and requests of this test are alive; the collector does not look."""
    before = _connections_and_requests()
    gc.disable()
    yield lambda: sum(
        not any(each is known for known in before) for each in _connections_and_requests()
    )
    gc.enable()


def _connections_and_requests() -> list[object]:
    return [each for each in gc.get_objects() if type(each) in (BoundedProtocol, RequestRecord)]


@pytest.mark.parametrize(
    ("fields", "status", "leaves"),
    [
        ({"max_tokens": 3}, b"200", False),
        ({"max_tokens": 3, "stream": True}, b"200", False),
        ({"max_tokens": -3}, b"400", False),
        ({"max_tokens": 10**8, "stream": True}, b"200", True),
    ],
)
async def test_requests_and_connections_are_freed_without_the_collector(
    serve, num_new: Callable[[], int], fields: dict, status: bytes, leaves: bool
) -> None:
    served = await serve()
    if not leaves:
        served.tokens(3)
    loop = asyncio.get_running_loop()
    for _ in range(3):
        client = await served.connect()
        for _ in range(1 if leaves else 3):
            await served.send(client, completion(**fields))
            async with asyncio.timeout(WAIT_S):
                answer = await loop.sock_recv(client, 65536)
                while not (leaves or answer.endswith((b"\r\n0\r\n\r\n", b"}"))):
                    answer += await loop.sock_recv(client, 65536)
            assert answer.startswith(b"HTTP/1.1 " + status)
        client.close()
    await served.until_nothing_is_left()
    await served.until(lambda: num_new() == 0)
