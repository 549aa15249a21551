"""Requests that stall are refused; those that come slowly but steadily, and answers, may take
their time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from gateway.http.connection_limits import LATE_S, Countdown
from protocol.messages import FinishReason
from router.requests.interface import TokenDelta
from tests.unit.gateway.api_harness import Pause
from tests.unit.gateway.served_http import COMPLETIONS, SOON_S, WAIT_S, Serve, completion


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
async def test_a_connection_without_a_request_is_cut(serve: Serve, sent: bytes) -> None:
    served = await serve(receive_timeout_s=SOON_S)
    client = await served.connect()
    await served.send(client, sent)
    assert await served.read_all(client) == b""
    await served.until(lambda: served.cuts("request not received in time") == 1)
    await served.until_nothing_is_left()
    client.close()


@pytest.mark.parametrize(
    ("begun", "reason"),
    [
        (b"GET /v1/mod", "request not received in time"),
        (b"GET /v1/models HTTP/1.1\r\nhost: x\r\n", "request not received in time"),
        (completion()[:-5], "body too slow"),
        (completion()[: completion().index(b"\r\n\r\n") + 4], "body too slow"),
    ],
)
async def test_a_request_that_stalls_is_408_and_gives_its_memory_back(
    serve: Serve, begun: bytes, reason: str
) -> None:
    served = await serve(receive_timeout_s=SOON_S)
    client = await served.connect()
    await served.send(client, begun)
    answer = await served.read_all(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer
    assert served.cuts(reason) == 1
    client.close()
    await served.until_nothing_is_left()
    assert served.metric("bytes_in_flight") == 0
    assert served.statuses(499) == (reason == "body too slow")
    assert served.metric("requests_total", endpoint=COMPLETIONS, status="500") == 0


async def test_a_slow_but_steady_body_may_take_many_times_as_long(serve: Serve) -> None:
    """However small its pieces are, and however long the whole takes."""
    served = await serve(receive_timeout_s=SOON_S, min_body_rate=20)
    served.tokens(2)
    request = completion(user="x" * 100)
    start = request.index(b"\r\n\r\n") + 4
    client = await served.connect()
    await served.send(client, request[:start])
    began = asyncio.get_running_loop().time()
    for at in range(start, len(request)):
        await served.send(client, request[at : at + 1])
        await asyncio.sleep(SOON_S / 30)
    assert asyncio.get_running_loop().time() - began > 3 * SOON_S
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_S):
        assert (await loop.sock_recv(client, 65536)).startswith(b"HTTP/1.1 200 ")
    client.close()


async def test_bytes_that_trickle_do_not_keep_a_body_alive(serve: Serve) -> None:
    served = await serve(receive_timeout_s=SOON_S, min_body_rate=1000)
    client = await served.connect()
    await served.send(client, completion(user="x" * 2000)[:-1900])
    async with asyncio.timeout(WAIT_S):
        while not served.cuts("body too slow"):
            await served.send(client, b" ")
            await asyncio.sleep(SOON_S / 30)
    assert (await served.read_all(client)).startswith(b"HTTP/1.1 408 ")
    client.close()


async def test_a_body_that_the_server_does_not_read_yet_is_not_late(serve: Serve) -> None:
    """It waits behind the answer to the request before it."""
    served = await serve(receive_timeout_s=SOON_S)
    served.tokens(1)
    first, last = Pause(), TokenDelta([70], finish=FinishReason.LENGTH)
    scripted, served.generator.script = served.generator.script, lambda request: [first, last]
    client = await served.connect()
    await served.send(client, completion())
    await served.until(lambda: served.metric("requests_in_flight", endpoint=COMPLETIONS) == 1)
    await served.until(lambda: len(served.generator.requests) == 1)
    served.generator.script = scripted
    second = completion()
    await served.send(client, second[:-5])
    for _ in range(2):  # each is cut after the time in which the body had to come
        silent = await served.connect()
        await served.read_all(silent)
        silent.close()
    first.end()
    await served.send(client, second[-5:])
    answers = b""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_S):
        while answers.count(b"HTTP/1.1 200 ") < 2:
            answers += await loop.sock_recv(client, 65536)
    assert served.cuts("body too slow") == 0
    client.close()


class LateLoop:
    """A loop whose timers are called by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []
        self.call: Callable[[], object] = lambda: None

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], object]) -> object:
        self.waits.append(seconds)
        self.call = call
        return self

    def cancel(self) -> None:
        """Cancel the timer."""
        self.call = lambda: None


def test_a_late_loop_is_not_the_clients_delay() -> None:
    loop, ended = LateLoop(), []
    timer = Countdown(cast("asyncio.AbstractEventLoop", loop), 30.0, lambda: ended.append(1))
    timer.start()
    loop.now += 35.0
    loop.call()
    assert (ended, loop.waits) == ([], [30.0, LATE_S])
    loop.now += LATE_S
    loop.call()
    assert ended == [1]


def test_a_countdown_that_is_started_again_runs_its_whole_time_on_the_same_timer() -> None:
    loop, ended = LateLoop(), []
    timer = Countdown(cast("asyncio.AbstractEventLoop", loop), 30.0, lambda: ended.append(1))
    timer.start()
    loop.now += 10.0
    timer.stop()
    timer.start()
    timer.start()
    loop.now += 20.0
    loop.call()
    assert (ended, loop.waits) == ([], [30.0, 10.0]), "10 s are left"
    timer.stop()
    loop.now += 10.0
    loop.call()
    assert ended == [], "it was stopped"
    timer.start()
    timer.stop()
    timer.start(5.0)
    loop.now += 5.0
    loop.call()
    assert (ended, loop.waits) == ([1], [30.0, 10.0, 30.0, 5.0]), "the shorter time counts"
    timer.start()
    timer.close()
    loop.now += 30.0
    loop.call()
    assert ended == [1]


async def test_an_idle_connection_that_sends_line_breaks_is_cut(serve: Serve) -> None:
    """They end the keep-alive time, but begin no request."""
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
