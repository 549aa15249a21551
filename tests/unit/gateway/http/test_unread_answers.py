"""What answers cost that their clients do not read, or read late."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from gateway.api.replies.json_pieces import take_some
from gateway.http.connection import WRITE_BUFFER_BYTES
from protocol.messages import FinishReason
from protocol.sampling import TokenLogprobs
from router.requests.interface import TokenDelta
from tests.unit.gateway.api_harness import Forever
from tests.unit.gateway.served_http import (
    COMPLETIONS,
    KERNEL_BYTES,
    SOON_S,
    WAIT_S,
    Serve,
    completion,
)


async def test_a_client_that_stops_reading_is_paused_then_cut_everywhere(serve: Serve) -> None:
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


async def test_a_client_that_reads_on_in_time_loses_nothing(serve: Serve) -> None:
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
    serve: Serve, monkeypatch: pytest.MonkeyPatch, keep_alive: bool, write_buffer: int
) -> None:
    """Whether or not what is left of it fills the buffer. An answer that does is not whole yet:
    its last pieces wait for the client."""
    monkeypatch.setattr("gateway.http.connection.WRITE_BUFFER_BYTES", write_buffer)
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
    assert served.statuses(499 if write_buffer == WRITE_BUFFER_BYTES else 200) == 1
    client.close()


async def test_a_long_answer_is_made_as_its_client_reads_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is left of it is not made when the client goes."""
    served = await serve()
    made: list[int] = []

    def counted(pieces: Iterator[bytes], num_bytes: int) -> bytes:
        made.append(num_bytes)
        return take_some(pieces, num_bytes)

    monkeypatch.setattr("gateway.api.replies.reply.take_some", counted)
    logprobs = TokenLogprobs(-0.5, tuple((70 + place, -1.5) for place in range(20)))
    large = TokenDelta([70] * 20_000, [logprobs] * 20_000, finish=FinishReason.LENGTH)
    served.generator.script = lambda request: [large]
    client = await served.connect()
    await served.send(client, completion(max_tokens=20_000, logprobs=20))
    await served.until(lambda: served.server.server_state.connections)
    (connection,) = served.server.server_state.connections
    await served.until(lambda: connection.flow.write_paused)
    assert connection.transport.get_write_buffer_size() <= 2 * (WRITE_BUFFER_BYTES + 1000)
    assert len(made) < 10
    head = await asyncio.get_running_loop().sock_recv(client, 1000)
    assert b"transfer-encoding: chunked" in head
    client.close()
    await served.until_nothing_is_left()
    assert served.statuses(499) == 1
    assert len(made) < 20, "of some hundred"


async def test_the_time_to_read_an_answer_is_not_that_of_the_next_one(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client reads to the end, but what was left of it never filled the buffer."""
    monkeypatch.setattr("gateway.http.connection.WRITE_BUFFER_BYTES", 10**7)
    served = await serve()
    large = TokenDelta([70] * 100_000, finish=FinishReason.LENGTH)
    served.generator.script = lambda request: [large]
    client = await served.connect()
    await served.send(client, completion(max_tokens=100_000, return_token_ids=True))
    await served.until(lambda: served.statuses(200) == 1)
    (connection,) = served.server.server_state.connections
    assert connection._stall.is_running, "the answer is whole, and was not read"
    answer, loop = b"", asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_S):
        while not answer.endswith(b"0\r\n\r\n"):
            answer += await loop.sock_recv(client, 65536)
    served.generator.script = lambda request: [Forever()]
    await served.send(client, completion(stream=True))
    await served.until(lambda: served.metric("requests_in_flight", endpoint=COMPLETIONS) == 1)
    assert not connection._stall.is_running
    client.close()
    await served.until_nothing_is_left()
    assert served.cuts("answer not read in time") == 0
