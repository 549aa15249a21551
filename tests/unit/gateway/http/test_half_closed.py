"""A client that has sent its last byte gets its answers; one that is gone is still noticed."""

from __future__ import annotations

import asyncio
import http.client
import io
import itertools
import json
import socket

import pytest

from gateway.http import half_closed
from gateway.http.connection import MAX_PIPELINED
from gateway.http.half_closed import PROBE_DELAYS_S, STATUS_START
from protocol.messages import FinishReason
from router.requests.interface import TokenDelta
from tests.effort import in_turn
from tests.unit.gateway.api_harness import Forever, Pause
from tests.unit.gateway.served_http import WAIT_S, Serve, Served, completion

LIVE = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve()


@pytest.fixture
def probed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes that an answer may begin with are written before it is there."""
    monkeypatch.setattr(half_closed, "PROBE_DELAYS_S", (0.0,) * len(PROBE_DELAYS_S))


async def half_close(served: Served, sent: bytes) -> socket.socket:
    """A client that has sent this, and will send nothing more."""
    client = await served.connect()
    await served.send(client, sent)
    client.shutdown(socket.SHUT_WR)
    return client


async def read(client: socket.socket, num_bytes: int) -> bytes:
    async with asyncio.timeout(WAIT_S):
        loop, found = asyncio.get_running_loop(), b""
        while len(found) < num_bytes:
            found += await loop.sock_recv(client, num_bytes - len(found))
    return found


def parsed(answer: bytes) -> http.client.HTTPResponse:
    """As a common client reads it."""

    class Connection:
        def makefile(self, mode: str) -> io.BytesIO:
            return io.BytesIO(answer)

    response = http.client.HTTPResponse(Connection())  # type: ignore[arg-type]
    response.begin()
    return response


@pytest.mark.usefixtures("probed_at_once")
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_comes_whole_and_ends_the_connection(
    served: Served, version: bytes, stream: bool
) -> None:
    pause = Pause()
    last = TokenDelta([71], finish=FinishReason.LENGTH)
    served.generator.script = lambda request: [pause, TokenDelta([70]), last]
    request = completion(stream=stream).replace(b"HTTP/1.1", b"HTTP/" + version)
    client = await half_close(served, request)
    begun = await read(client, len(STATUS_START))
    assert begun == STATUS_START
    pause.end()
    response = parsed(begun + await served.read_all(client))
    assert response.status == 200
    assert response.getheader("connection") == "close"
    body = response.read().decode()
    if stream:
        *events, done = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
        assert done == "[DONE]"
        assert "".join(json.loads(each)["choices"][0]["text"] for each in events) == "ef"
    else:
        assert json.loads(body)["choices"][0]["text"] == "ef"
    client.close()
    await served.until_nothing_is_left()
    assert served.statuses(200) == 1


@pytest.mark.usefixtures("probed_at_once")
async def test_an_error_after_a_while_comes_whole(served: Served) -> None:
    pause = Pause()
    served.generator.script = lambda request: [pause, RuntimeError("broken")]
    client = await half_close(served, completion())
    begun = await read(client, len(STATUS_START))
    pause.end()
    response = parsed(begun + await served.read_all(client))
    assert response.status == 500
    assert "error" in json.loads(response.read())
    client.close()


@pytest.mark.usefixtures("probed_at_once")
async def test_a_stream_that_falls_silent_goes_on(served: Served) -> None:
    """What is written into the silence belongs to the next chunk."""
    pause = Pause()
    last = TokenDelta([71], finish=FinishReason.LENGTH)
    served.generator.script = lambda request: [TokenDelta([70]), pause, last]
    client = await served.connect()
    await served.send(client, completion(stream=True))
    answer = b""
    while not answer.endswith(b"}\n\n\r\n"):
        answer += await read(client, 1)
    client.shutdown(socket.SHUT_WR)
    zeros = await read(client, len(PROBE_DELAYS_S))
    assert zeros == b"0" * len(PROBE_DELAYS_S)
    pause.end()
    body = parsed(answer + zeros + await served.read_all(client)).read().decode()
    assert body.count("data: {") == 2
    assert body.endswith("data: [DONE]\n\n")
    client.close()
    await served.until_nothing_is_left()


@pytest.mark.parametrize(
    ("num_ahead", "rest"),
    in_turn(
        [10 * MAX_PIPELINED, 0, 2 * MAX_PIPELINED, 2],
        [completion()[:-5], b"", b"\x16\x03\r\n", b"GET /li"],
    ),
)
async def test_all_whole_requests_are_answered(served: Served, num_ahead: int, rest: bytes) -> None:
    """However many come at once, and whatever follows them."""
    pause = Pause()
    last = TokenDelta([70], finish=FinishReason.LENGTH)
    served.generator.script = lambda request: [pause, last]
    client = await half_close(served, completion() + LIVE * num_ahead + rest)
    assert await read(client, 1) == STATUS_START[:1]
    pause.end()
    answers = STATUS_START[:1] + await served.read_all(client)
    assert answers.count(b"HTTP/1.1 200 ") == 1 + num_ahead
    assert answers.count(b"HTTP/1.1 400 ") == rest.count(b"\x16")
    client.close()
    await served.until_nothing_is_left()


@pytest.mark.parametrize("sent", [LIVE[:-3], completion()[:-5], b""])
async def test_a_request_that_stays_incomplete_ends_with_its_client(
    served: Served, sent: bytes
) -> None:
    client = await half_close(served, sent)
    assert await served.read_all(client) == b""
    client.close()
    await served.until_nothing_is_left()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_a_half_closed_client_that_goes_is_noticed(
    served: Served, stream: bool, num_tokens: int
) -> None:
    """Before its answer has begun, and in the silence of a stream."""
    served.generator.script = lambda request: [*[TokenDelta([70])] * num_tokens, Forever()]
    client = await half_close(served, completion(stream=stream))
    assert await read(client, 1) == STATUS_START[:1]
    client.close()
    await served.until_nothing_is_left()
    assert served.statuses(499) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_behind_a_proxy_that_copies_bytes_is_noticed(
    served: Served, stream: bool
) -> None:
    """The proxy passes on that the client sends nothing more, whether or not it is gone. It learns
    which by writing to it, and then ends its own connection."""
    served.generator.script = lambda request: [Forever()]

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*served.listener.getsockname())
        both = asyncio.gather(copy(reader, back), copy(there, writer))
        try:
            await both
        except ConnectionError:
            both.cancel()
            await asyncio.gather(both, return_exceptions=True)
        finally:
            writer.close()
            back.close()

    proxy = await asyncio.start_server(carry, "127.0.0.1", 0)
    client = socket.create_connection(proxy.sockets[0].getsockname())
    client.setblocking(False)
    await served.send(client, completion(stream=stream))
    await served.until(lambda: served.generator.requests)
    client.close()
    await served.until_nothing_is_left()
    assert served.statuses(499) == 1
    proxy.close()
    await proxy.wait_closed()


async def test_a_host_that_is_gone_is_given_up_in_time(serve: Serve) -> None:
    """It confirms nothing, so there is no reset either."""
    served = await serve(stall_timeout_s=7.0)
    served.generator.script = lambda request: [Forever()]
    client = await half_close(served, completion())
    assert await read(client, 1) == STATUS_START[:1]
    (connection,) = served.server.server_state.connections
    server_side = connection.transport.get_extra_info("socket")
    assert server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
    client.close()
    await served.until_nothing_is_left()


def test_no_more_is_begun_than_all_answers_begin_with() -> None:
    assert len(PROBE_DELAYS_S) == len(STATUS_START)
    *early, _ = itertools.accumulate(PROBE_DELAYS_S)
    assert early[2] <= 0.5, "a proxy that copies bytes needs three"
