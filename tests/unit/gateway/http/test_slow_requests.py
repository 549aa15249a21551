"""Requests that do not come whole in time are cut; answers may take their time."""

from __future__ import annotations

import asyncio

import pytest

from protocol.messages import FinishReason
from router.requests.interface import TokenDelta
from tests.unit.gateway.served_http import COMPLETIONS, SOON_S, WAIT_S, Serve, completion


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
async def test_a_request_that_does_not_come_whole_is_cut(serve: Serve, begun: bytes) -> None:
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


async def test_an_idle_connection_that_sends_line_breaks_is_cut(serve: Serve) -> None:
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


async def test_the_time_to_receive_does_not_limit_the_answer(serve: Serve) -> None:
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
