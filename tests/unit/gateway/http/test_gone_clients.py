"""A client that goes is noticed at once, whatever it had sent before."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import ssl
from pathlib import Path

import pytest
import trustme
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.http.certificates import TlsFiles
from gateway.http.connection import MAX_PIPELINED
from protocol.messages import FinishReason
from router.requests.interface import TokenDelta
from tests.effort import times
from tests.unit.gateway.api_harness import MODEL, Forever
from tests.unit.gateway.http.test_tls import write_certificate
from tests.unit.gateway.served_http import COMPLETIONS, WAIT_S, Serve, Served, completion

READ_BYTES = 256_000
"""The most that the event loop reads at once."""
MAX_BYTES = 3 * READ_BYTES
SIZES = st.one_of(
    st.integers(100, MAX_BYTES),
    st.builds(
        lambda times, more: times * READ_BYTES + more,
        st.integers(1, 2),
        st.integers(-300, 66_000),
    ),
)
CUTS = st.lists(st.one_of(st.integers(1, 300), st.integers(300, READ_BYTES)), max_size=8)


def request_of(size: int, stream: bool, is_chunked: bool) -> bytes:
    """A request whose body has `size` bytes, most of them spaces."""
    fields = json.dumps({"model": MODEL, "prompt": "Hi", "stream": stream}).encode()
    body = fields[:-1] + b" " * (size - len(fields)) + b"}"
    length = b"content-length: %d" % len(body)
    if is_chunked:
        length, half = b"transfer-encoding: chunked", len(body) // 2
        chunks = (body[:half], body[half:], b"")
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + length + b"\r\n\r\n" + body


async def until_it_runs(served: Served, num_before: int = 0) -> None:
    await served.until(lambda: len(served.generator.requests) > num_before)


@pytest.fixture
async def served(serve: Serve) -> Served:
    """One server for all of a test's examples; generations do not end."""
    served = await serve(max_body_bytes=MAX_BYTES)
    served.generator.script = lambda request: [Forever()]
    return served


@settings(max_examples=times(20, 200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=SIZES, cuts=CUTS, stream=st.booleans(), is_chunked=st.booleans())
@example(size=350_000, cuts=[], stream=False, is_chunked=False)
async def test_a_body_of_any_size_in_any_parts_does_not_hide_that_its_client_goes(
    served: Served, size: int, cuts: list[int], stream: bool, is_chunked: bool
) -> None:
    num_gone, num_before = served.statuses(499), len(served.generator.requests)
    client = await served.connect()
    request = request_of(size, stream, is_chunked)
    ends = [*itertools.accumulate(cuts, initial=0), len(request)]
    for start, end in itertools.pairwise(ends):
        await served.send(client, request[start:end])
        await asyncio.sleep(0)
    await until_it_runs(served, num_before)
    client.close()
    await served.until_nothing_is_left()
    assert served.statuses(499) == num_gone + 1


@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", [completion(), request_of(50_000, False, False)[:-9]])
async def test_requests_behind_the_one_in_flight_do_not_hide_that_their_client_goes(
    serve: Serve, tmp_path: Path, is_tls: bool, stream: bool, behind: bytes
) -> None:
    """Reading pauses for them, and goes on when the first is answered."""
    authority = trustme.CA()
    write_certificate(authority, tmp_path)
    tls = TlsFiles(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    served = await serve(max_body_bytes=MAX_BYTES, tls=tls if is_tls else None)
    served.generator.script = lambda request: [Forever()]
    context = ssl.create_default_context()
    authority.configure_trust(context)
    host, port = served.listener.getsockname()
    _, writer = await asyncio.open_connection(host, port, ssl=context if is_tls else None)
    writer.write(completion(stream=stream))
    await until_it_runs(served)
    writer.write(behind)
    await writer.drain()
    (connection,) = served.server.server_state.connections
    await served.until(lambda: connection.flow.read_paused)
    writer.transport.abort()
    await served.until_nothing_is_left()
    assert served.statuses(499) == 1


@pytest.mark.parametrize("expects", [b"", b"expect: 100-continue\r\n"])
@pytest.mark.parametrize("num_bytes", [0, 100, 200_000])
async def test_a_client_that_leaves_in_the_middle_of_its_body_is_noticed(
    served: Served, expects: bytes, num_bytes: int
) -> None:
    client = await served.connect()
    head, _, body = request_of(300_000, False, False).partition(b"\r\n\r\n")
    begun = head + b"\r\n" + expects + b"\r\n" + body[:num_bytes]
    await served.send(client, begun)
    await served.until(lambda: served.metric("requests_in_flight", endpoint=COMPLETIONS) == 1)
    client.close()
    await served.until_nothing_is_left()
    assert served.statuses(499) == 1


async def test_a_connection_stays_in_use_after_a_large_body(served: Served) -> None:
    """And its client is still noticed when it goes during the next request."""
    end = TokenDelta([70], finish=FinishReason.LENGTH)
    served.generator.script = lambda request: [end]
    client = await served.connect()
    for _ in range(3):
        await served.send(client, request_of(350_000, False, False))
        answer = b""
        while not answer.endswith(b"}"):
            answer += await connection_bytes(client)
        assert answer.startswith(b"HTTP/1.1 200 ")
    served.generator.script = lambda request: [Forever()]
    await served.send(client, request_of(350_000, False, False))
    await until_it_runs(served, 3)
    client.close()
    await served.until_nothing_is_left()
    assert served.statuses(499) == 1


async def connection_bytes(client: socket.socket) -> bytes:
    async with asyncio.timeout(WAIT_S):
        return await asyncio.get_running_loop().sock_recv(client, 65536)


async def test_requests_read_ahead_take_little_memory_while_the_first_is_answered(
    served: Served,
) -> None:
    client = await served.connect()
    ahead = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
    await served.send(client, completion() + ahead * 20 * MAX_PIPELINED)
    await until_it_runs(served)
    (connection,) = served.server.server_state.connections
    sending = asyncio.ensure_future(served.send(client, ahead * 200_000))
    await served.until(lambda: connection.flow.read_paused)
    await asyncio.sleep(0.05)
    assert len(connection._waiting) < 2 * READ_BYTES
    assert not sending.done()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    client.close()
    connection.transport.abort()  # the end of what it sends is behind more than is taken
    await served.until_nothing_is_left()
