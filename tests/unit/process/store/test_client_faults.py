"""What the store's client hides from its callers. Tasks that keep something in the store end
together, and when they are cancelled, even if the client swallows the cancellation, as
`asyncio.wait_for` may before Python 3.12."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import RedisError

from process.store.client_faults import answer_of, drop_connections
from process.store.load_channel import LoadChannel
from process.store.registry import client_from_url
from process.store.router_board import RouterBoard
from process.store.router_leases import RouterLease
from tests.tls_store import TlsStore, tls_store

WAIT_S = 60.0
MOST_TURNS = 20
URL = "redis://127.0.0.1:1"


class SwallowingClient:
    """Its answers wait until their task is cancelled, and come nevertheless."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.is_asked = asyncio.Event()
        self.is_closed = False

    async def answer(self, *args: Any, **named: Any) -> Any:
        """To any question; those of a task that is being cancelled come at once."""
        self.num_asked += 1
        self.is_asked.set()
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                break
        return None

    eval = time = publish = answer

    async def aclose(self) -> None:
        self.is_closed = True

    def pubsub(self, **named: Any) -> Channel:
        return Channel(self)

    def pipeline(self, **named: Any) -> Pipeline:
        return Pipeline(self)


class Channel:
    def __init__(self, client: SwallowingClient) -> None:
        self.client = client

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *args: object) -> None:
        pass

    async def subscribe(self, *names: str) -> None:
        """Answered at once."""

    async def get_message(self, **named: Any) -> None:
        await self.client.answer()


class Pipeline(Channel):
    async def __aenter__(self) -> Pipeline:
        return self

    def set(self, *args: Any, **named: Any) -> None:
        pass

    delete = zrem = zadd = zremrangebyscore = zrange = set

    async def execute(self) -> list[Any]:
        await self.client.answer()
        return [[]]


def lease() -> RouterLease:
    return RouterLease(URL, "cluster", "one")


def board(summary: Callable[[], bytes] = lambda: b"") -> RouterBoard:
    return RouterBoard(URL, "cluster", summary, lambda peers: None, lambda question: None)


def channel(news: Callable[[], bytes] = lambda: b"news") -> LoadChannel:
    made = LoadChannel(URL, "cluster", news, lambda message: None, lambda: True)
    made.wake()
    return made


@pytest.mark.parametrize(("make", "num_asked"), [(lease, 1), (board, 2), (channel, 2)])
async def test_a_cancellation_that_the_client_swallows_ends_the_task(
    make: Callable[[], Any], num_asked: int
) -> None:
    kept, client = make(), SwallowingClient()
    kept._client = client
    task = asyncio.create_task(kept.run())
    while client.num_asked < num_asked:
        client.is_asked.clear()
        await client.is_asked.wait()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=60)
    assert done == {task}
    assert task.cancelled()
    assert client.is_closed


class QuickClient(SwallowingClient):
    """Writes and asks at once; only messages of its channels never come."""

    async def time(self, *args: Any, **named: Any) -> tuple[int, int]:
        return 0, 0

    def pipeline(self, **named: Any) -> Pipeline:
        return QuickPipeline(self)


class QuickPipeline(Pipeline):
    async def execute(self) -> list[Any]:
        return [[]]


def mistaken() -> bytes:
    raise RuntimeError("a mistake of ours, not of the client")


@pytest.mark.parametrize("make", [partial(board, mistaken), partial(channel, mistaken)])
async def test_our_own_mistake_ends_all_tasks_so_that_none_runs_twice_after_the_restart(
    make: Callable[[], Any],
) -> None:
    kept = make()
    kept._client = QuickClient()
    before = asyncio.all_tasks()
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        await kept.run()
    assert kept._client.is_closed
    assert asyncio.all_tasks() == before


async def test_a_write_to_a_reset_connection_is_an_error_of_the_store() -> None:
    async def write() -> None:
        raise RuntimeError("unable to perform operation; the handler is closed")

    asked: Awaitable[None] = write()
    with pytest.raises(RedisError, match="the connection is gone"):
        await answer_of(asked)


@asynccontextmanager
async def carried(port: int, goes_on: asyncio.Event) -> AsyncIterator[int]:
    """Another port that leads to this one, and carries bytes while `goes_on` is set."""

    async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                await goes_on.wait()
                target.write(data)
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, orders = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, orders), carry(answers, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            goes_on.set()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TlsStore]:
    with tls_store(tmp_path) as running:
        yield running


async def test_connections_to_a_store_that_is_gone_are_dropped_at_once(store: TlsStore) -> None:
    """Nobody answers the end of TLS. The request that saw the store go waits for nothing."""
    goes_on = asyncio.Event()
    goes_on.set()
    async with carried(store.tls_port, goes_on) as port:
        url = store.url.replace(f":{store.tls_port}", f":{port}")
        async with client_from_url(redis.asyncio.Redis, url, WAIT_S) as client:
            await client.ping()
            (idle,) = client.connection_pool._available_connections
            goes_on.clear()
            dropping = asyncio.create_task(drop_connections(client))
            for _ in range(MOST_TURNS):
                await asyncio.sleep(0)
            assert dropping.done()
            assert not idle.is_connected
            goes_on.set()
            assert await client.ping()
