"""Leases of routers against a real Valkey, as workers see them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import pytest
import redis

from process.store.embedded_valkey import EmbeddedValkey
from process.store.router_leases import RouterLease
from tests.integration.lease_holder import LONG_S, renewed
from tests.registration import registration

LEASE_S = 3.0
WAIT_S = 60.0


@pytest.fixture
def routers(cluster: str, leases) -> Callable[[], Collection[str]]:
    """The live routers, as a worker knows them that asks often."""
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)
    return lambda: renewed(lease) and lease.routers()


@asynccontextmanager
async def router(url: str, cluster: str, name: str) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(RouterLease(url, cluster, name, LEASE_S).run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not check():
            await asyncio.sleep(0.01)


async def wait_renewed(client: redis.Redis, key: str) -> None:
    """Wait until an existing lease has been renewed."""
    before = client.pexpiretime(key)
    assert before > 0
    await until(lambda: client.pexpiretime(key) > before)


async def test_workers_see_each_router_until_it_leaves(
    valkey: EmbeddedValkey, cluster: str, routers: Callable[[], Collection[str]]
) -> None:
    async with router(valkey.url, cluster, "one"):
        async with router(valkey.url, cluster, "two"):
            await until(lambda: routers() == {"one", "two"})
            with redis.Redis.from_url(valkey.url) as client:
                for name in ("one", "two"):
                    await wait_renewed(client, f"baton:{cluster}:router_lease:{name}")
            await until(lambda: routers() == {"one", "two"})
        with redis.Redis.from_url(valkey.url) as client:
            assert b"two" not in client.smembers(f"baton:{cluster}:router_leases"), "it left"
        await until(lambda: routers() == {"one"})
    await until(lambda: routers() == set())


async def test_a_router_that_no_longer_renews_its_lease_is_not_seen(
    valkey: EmbeddedValkey, cluster: str, routers: Callable[[], Collection[str]]
) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        client.sadd(f"baton:{cluster}:router_leases", "dead")
        client.set(f"baton:{cluster}:router_lease:dead", "1", px=round(LONG_S * 1e3))
        await until(lambda: routers() == {"dead"})
        client.pexpire(f"baton:{cluster}:router_lease:dead", 1)
        await until(lambda: routers() == set())
        assert client.smembers(f"baton:{cluster}:router_leases") == set(), "its name is forgotten"


async def test_a_router_takes_its_lease_again_when_the_store_is_back(
    cluster: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "process.store.router_leases")
    store = EmbeddedValkey().start()
    try:
        async with router(store.url, cluster, "one") as task:
            key = f"baton:{cluster}:router_lease:one"
            with redis.Redis.from_url(store.url) as client:
                await until(lambda: client.exists(key) == 1)
            store.stop()
            await until(lambda: "the router's lease was not renewed" in caplog.text)
            assert not task.done()
            store.restart()
            with redis.Redis.from_url(store.url) as client:
                await until(lambda: client.exists(key) == 1)
    finally:
        store.stop()
