"""A store whose name resolves slowly is reached, and errors tell names from connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from process.store.embedded_valkey import EmbeddedValkey
from process.store.registry import client_from_url
from process.store.resolved_connection import (
    LookUp,
    NameResolver,
    look_up,
)


class SlowNames:
    """Answers nothing until `answer` is called."""

    def __init__(self) -> None:
        self.num_asked = 0
        self._answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    async def look_up(self, host: str, port: int) -> list[str]:
        self.num_asked += 1
        return await self._answer

    def answer(self, *addresses: str) -> None:
        self._answer.set_result(list(addresses))


async def names(*addresses: str) -> LookUp:
    async def found(host: str, port: int) -> list[str]:
        return list(addresses)

    return found


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as started:
        yield started


@asynccontextmanager
async def client_of(url: str, lookup: LookUp, limit_s: float) -> AsyncIterator[Any]:
    """A client of the store under another name, resolved by `lookup`."""
    client = client_from_url(redis.asyncio.Redis, url.replace("127.0.0.1", "slow-store"), 2.0)
    client.connection_pool.connection_kwargs["resolver"] = NameResolver(lookup, limit_s)
    async with client:
        yield client


async def test_a_name_that_takes_longer_than_an_attempt_is_found_by_a_later_one(valkey) -> None:
    slow = SlowNames()
    async with client_of(valkey.url, slow.look_up, limit_s=0.001) as client:
        for _ in range(3):
            with pytest.raises(RedisConnectionError) as failed:
                await client.ping()
            assert "the name slow-store did not resolve within 0.001 s (DNS)" in str(failed.value)
        slow.answer("127.0.0.1")
        await asyncio.sleep(0)
        assert await client.ping()
        assert slow.num_asked == 1


async def test_the_limit_of_connecting_does_not_include_the_name(valkey) -> None:
    slow = SlowNames()
    async with client_of(valkey.url, slow.look_up, limit_s=60.0) as client:
        client.connection_pool.connection_kwargs["socket_connect_timeout"] = 0.5
        asked = asyncio.create_task(client.ping())
        while not slow.num_asked:
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.6, slow.answer, "127.0.0.1")
        assert await asked


async def test_each_address_of_a_name_is_tried(valkey) -> None:
    async with client_of(valkey.url, await names("127.0.0.9", "127.0.0.1"), 60.0) as client:
        assert await client.ping()
    async with client_of(valkey.url, await names("127.0.0.9"), 60.0) as client:
        with pytest.raises(RedisConnectionError, match="slow-store"):
            await client.ping()
    async with client_of(valkey.url, await names(), 60.0) as client:
        with pytest.raises(RedisConnectionError, match="slow-store has no address"):
            await client.ping()


async def test_a_name_that_does_not_exist_is_asked_for_again() -> None:
    asked = []

    async def unknown(host: str, port: int) -> list[str]:
        asked.append((host, port))
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    resolver = NameResolver(unknown, 60.0)
    for _ in range(2):
        with pytest.raises(socket.gaierror, match="not known"):
            await resolver.addresses("store", 6379)
    assert asked == [("store", 6379)] * 2


async def test_the_system_knows_addresses() -> None:
    assert await look_up("127.0.0.1", 1) == ["127.0.0.1"]


def test_certificates_are_of_the_name_and_sockets_have_none() -> None:
    client = client_from_url(redis.asyncio.Redis, "rediss://store.example:6380", 2.0)
    connection = client.connection_pool.make_connection()
    connection._address = "10.0.0.1"
    arguments = connection._connection_arguments()
    assert (arguments["host"], arguments["server_hostname"]) == ("10.0.0.1", "store.example")
    local = client_from_url(redis.asyncio.Redis, "unix:///run/valkey.sock", 2.0)
    assert "resolver" not in local.connection_pool.connection_kwargs
