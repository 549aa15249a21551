"""Nothing of connections and requests waits for the collector."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator

import pytest

from gateway.http.connection import BoundedProtocol
from gateway.http.request_scope import RequestRecord
from tests.unit.gateway.served_http import WAIT_S, Serve, completion


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
    serve: Serve, num_new: Callable[[], int], fields: dict, status: bytes, leaves: bool
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
