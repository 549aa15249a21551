"""A fleet that is watched in a real Valkey, which loses its memory or goes away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import redis

from process.store.embedded_valkey import EmbeddedValkey
from process.store.fleet_watcher import FleetWatcher, read_fleet
from process.store.ignored_entries import REGISTRATION, IgnoredEntries
from process.store.registry import Registry
from process.store.worker_lease import WorkerLease
from protocol import wire
from protocol.registration import WorkerState
from tests.integration.lease_holder import LONG_S, renewed
from tests.integration.watched_fleet import WAIT_S, change, watching
from tests.polling import until_in_thread
from tests.registration import registration

STORE_LEASE_S = 6.0  # where the store stands still: half of it a lease waits for an answer
NUM_RESETS = 30


@asynccontextmanager
async def resettable(port: int) -> AsyncIterator[tuple[int, Callable[[], None]]]:
    """A port that leads to another one of this host, and what resets every connection to it."""
    clients: set[asyncio.StreamWriter] = set()

    async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while (data := await source.read(65536)) and not target.is_closing():
                target.write(data)
        target.close()

    async def serve(source: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        ending = struct.pack("ii", 1, 0)  # whatever waits to be sent is dropped, and a reset sent
        client.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ending)
        clients.add(client)
        answers, store = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(forward(source, store), forward(answers, client))

    def reset() -> None:
        for client in clients:
            client.transport.abort()
        clients.clear()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], reset


# -- watching -----------------------------------------------------------------------------------


async def test_a_watcher_follows_the_fleet(valkey, cluster, leases) -> None:
    async with watching(valkey.url, cluster) as (watcher, changes):
        first = leases(registration("a"))
        assert await change(changes) == {"a": registration("a")}
        leases(registration("b"))
        assert await change(changes) == {"a": registration("a"), "b": registration("b")}
        await asyncio.to_thread(first.close)
        assert await change(changes) == {"b": registration("b")}
        assert watcher.members == {"b": registration("b")}
        assert watcher.is_connected
    assert not watcher.is_connected


async def test_announcements_come_before_the_next_full_read(valkey, cluster, leases) -> None:
    lease = leases(registration("a"))
    assert await asyncio.to_thread(lease.wait_registered, WAIT_S)
    changes: asyncio.Queue = asyncio.Queue()
    watcher = FleetWatcher(valkey.url, cluster, changes.put_nowait, poll_s=3600.0)
    task = asyncio.create_task(watcher.run())
    assert list(await change(changes)) == ["a"]
    lease.update(WorkerState.DRAINING)
    assert (await change(changes))["a"].state is WorkerState.DRAINING
    task.cancel()
    await asyncio.wait([task])


async def test_an_ended_lease_is_noticed(valkey, cluster) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        client.eval(*Registry(cluster).claim(registration("a"), LONG_S))
        async with watching(valkey.url, cluster) as (_, changes):
            assert await change(changes) == {"a": registration("a")}
            client.pexpire(Registry(cluster).worker_key("a"), 1)
            assert await change(changes) == {}


async def test_registrations_that_cannot_be_read_are_ignored(valkey, cluster, leases) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        registry = Registry(cluster)
        client.sadd(registry.workers_key, "x", "y", b"\xff\xfe", "gone")
        client.set(registry.worker_key("x"), b"\xffnot json")
        client.set(registry.worker_key("y"), wire.encode_worker_info(registration("z")))
        client.set(registry.worker_key("").encode() + b"\xff\xfe", b"{}")
        ignored = IgnoredEntries()
        async with watching(valkey.url, cluster, ignored=ignored) as (_, changes):
            leases(registration("a"))
            assert await change(changes) == {"a": registration("a")}
            assert ignored.counts[REGISTRATION] == 3


# -- a store that loses its memory or goes away -----------------------------------------------


async def test_nobody_is_lost_when_the_store_forgets_everything(valkey, cluster, leases) -> None:
    lease = leases(registration("a"))
    assert await asyncio.to_thread(lease.wait_registered, WAIT_S)
    async with watching(valkey.url, cluster, settle_s=WAIT_S) as (watcher, changes):
        assert await change(changes) == {"a": registration("a")}
        with redis.Redis.from_url(valkey.url) as client:
            client.flushall()
        await until_in_thread(lambda: renewed(lease) and lease.lapses == 1)
        lease.update(WorkerState.DRAINING)
        assert (await change(changes))["a"].state is WorkerState.DRAINING, "never empty"
        assert watcher.members.keys() == {"a"}


async def test_a_newcomer_that_took_the_id_in_an_empty_store_gives_it_back(
    valkey, cluster, leases
) -> None:
    lease = leases(registration("a"))
    assert await asyncio.to_thread(lease.wait_registered, WAIT_S)
    registry, newcomer = Registry(cluster), registration("a", "newcomer")
    with redis.Redis.from_url(valkey.url) as client, client.pipeline(transaction=True) as pipeline:
        pipeline.flushall()
        pipeline.eval(*registry.claim(newcomer, WAIT_S))
        pipeline.eval(*registry.read())
        pipeline.execute()
    ours = {"a": registration("a")}
    await until_in_thread(lambda: renewed(lease) and read_fleet(valkey.url, cluster) == ours)
    assert (lease.lapses, lease.has_lapsed, lease.refusal) == (1, False, None)


async def test_a_store_that_is_killed_and_comes_back_empty(cluster) -> None:
    with EmbeddedValkey() as valkey:
        lease = WorkerLease(valkey.url, cluster, registration("a"), LONG_S)
        lease.start()
        async with watching(valkey.url, cluster, settle_s=WAIT_S) as (watcher, changes):
            assert await change(changes) == {"a": registration("a")}
            os.kill(valkey.pid, signal.SIGKILL)
            await until_in_thread(lambda: not watcher.is_connected)
            assert watcher.members == {"a": registration("a")}, "the last known fleet"
            await until_in_thread(lambda: renewed(lease) and lease.is_alive("other", "life"))
            await asyncio.to_thread(valkey.restart)
            await until_in_thread(lambda: watcher.is_connected)
            again = {"a": registration("a")}
            await until_in_thread(lambda: read_fleet(valkey.url, cluster) == again)
            assert changes.empty(), "the router never heard of it"
            lease.update(WorkerState.DRAINING)
            assert (await change(changes))["a"].state is WorkerState.DRAINING
        await asyncio.to_thread(lease.close)


async def test_a_worker_that_died_while_the_store_was_away_is_lost_later(cluster) -> None:
    with EmbeddedValkey() as valkey:
        with redis.Redis.from_url(valkey.url) as client:
            client.eval(*Registry(cluster).claim(registration("a"), 30.0))
        async with watching(valkey.url, cluster, settle_s=0.5) as (watcher, changes):
            assert await change(changes) == {"a": registration("a")}
            os.kill(valkey.pid, signal.SIGKILL)
            await until_in_thread(lambda: not watcher.is_connected)
            await asyncio.to_thread(valkey.restart)
            assert await change(changes) == {}


async def test_connections_that_are_reset_at_any_moment_are_reopened(
    valkey, cluster, leases
) -> None:
    """While they say nothing, are asked something, or are made: a reset, unlike an end, breaks
    them for the next writer, too."""
    lease = leases(registration("a"))
    moments = random.Random(7)
    async with resettable(valkey.port) as (port, reset):
        url = valkey.url.replace(f":{valkey.port}", f":{port}")
        async with watching(url, cluster) as (_, changes):
            assert await change(changes) == {"a": registration("a")}
            for _ in range(NUM_RESETS):
                await asyncio.sleep(moments.uniform(0.0, 0.15))
                reset()
            lease.update(WorkerState.DRAINING)
            assert (await change(changes))["a"].state is WorkerState.DRAINING


async def test_a_stopped_store_blocks_nobody(cluster) -> None:
    """SIGSTOP: connections stand, nothing answers."""
    with EmbeddedValkey() as valkey:
        lease = WorkerLease(valkey.url, cluster, registration("a"), STORE_LEASE_S)
        lease.start()
        async with watching(valkey.url, cluster, settle_s=WAIT_S) as (watcher, changes):
            assert await change(changes) == {"a": registration("a")}
            os.kill(valkey.pid, signal.SIGSTOP)
            await until_in_thread(lambda: not watcher.is_connected)
            await until_in_thread(lambda: lease.is_alive("b", "any"))
            os.kill(valkey.pid, signal.SIGCONT)
            await until_in_thread(lambda: watcher.is_connected and not lease.is_alive("b", "any"))
            assert watcher.members == {"a": registration("a")}
            assert changes.empty()
        await asyncio.to_thread(lease.close)
        assert read_fleet(valkey.url, cluster) == {}
