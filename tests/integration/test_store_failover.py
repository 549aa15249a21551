"""A store that fails over: its name leads to the new primary, and the old one becomes a replica
that keeps its connections and refuses every write."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
import redis

from process.store.embedded_valkey import EmbeddedValkey
from process.store.fleet_watcher import FleetWatcher, read_fleet
from process.store.load_channel import LoadChannel
from process.store.response_records import ResponseName, ResponseRecord, ResponseRecords
from process.store.router_board import RouterBoard
from process.store.router_leases import RouterLease
from process.store.worker_lease import WorkerLease
from protocol.errors import StoreAway
from tests.polling import until, until_in_thread
from tests.registration import registration

WAIT_S = 60.0
LEASE_S = 0.5


class MovingName:
    """A port that leads to a store, and later to another one. Connections stay where they are."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield

    async def _serve(self, source: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        answers, store = await asyncio.open_connection("127.0.0.1", self.target)
        await asyncio.gather(_forward(source, store), _forward(answers, client))


async def _forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            target.write(data)
    target.close()


def fail_over(old: EmbeddedValkey, new: EmbeddedValkey) -> None:
    """The new store gets the old one's password and data, and the old one becomes its replica."""
    password = urlsplit(old.url).password or ""
    with redis.Redis.from_url(new.url) as first, redis.Redis.from_url(old.url) as second:
        for client in (first, second):
            client.config_set("masterauth", password)
            client.config_set("repl-diskless-sync-delay", 0)
        first.config_set("requirepass", password)
        first.replicaof("127.0.0.1", str(old.port))
        until(lambda: first.info("replication")["master_link_status"] == "up")
        first.replicaof("NO", "ONE")
        second.replicaof("127.0.0.1", str(new.port))


async def test_everybody_goes_to_the_new_primary(cluster: str) -> None:
    with EmbeddedValkey() as old, EmbeddedValkey() as new:
        name = MovingName(old.port)
        async with name.serving():
            url = old.url.replace(f":{old.port}", f":{name.port}")
            new_url = old.url.replace(f":{old.port}", f":{new.port}")
            lease = WorkerLease(url, cluster, registration("a"), LEASE_S)
            watcher = FleetWatcher(url, cluster, lambda members: None)
            router = RouterLease(url, cluster, "one", LEASE_S)
            board = RouterBoard(url, cluster, lambda: b"", lambda peers: None, lambda asked: None)
            records = ResponseRecords(url, cluster, 1 << 20, time.monotonic)
            record = ResponseRecord("completed", False, b"{}", b"[]")
            lease.start()
            tasks = [asyncio.create_task(each.run()) for each in (watcher, router, board)]
            await records.put(ResponseName("owner", "first"), record)
            await until_in_thread(lambda: watcher.is_connected and lease.is_registered)
            await asyncio.to_thread(fail_over, old, new)
            name.target = new.port
            with redis.Redis.from_url(new_url) as client:
                keys = (f"baton:{cluster}:router_lease:one", f"baton:{cluster}:routers")
                client.delete(*keys)  # which were replicated
                await until_in_thread(lambda: client.exists(*keys) == len(keys))
            await until_in_thread(lambda: read_fleet(new_url, cluster) == {"a": registration("a")})
            other = WorkerLease(new_url, cluster, registration("b"), WAIT_S)
            other.start()
            await until_in_thread(lambda: "b" in watcher.members)
            await _put(records, ResponseName("owner", "second"), record)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await records.close()
            for each in (lease, other):
                await asyncio.to_thread(each.close)


async def test_routers_that_stay_tell_those_that_come_after_a_failover(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("process.store.load_channel.RENEW_S", 0.1)
    with EmbeddedValkey() as old, EmbeddedValkey() as new:
        name = MovingName(old.port)
        async with name.serving():
            url = old.url.replace(f":{old.port}", f":{name.port}")
            early, late = list[bytes](), list[bytes]()
            stays, listens, comes = (
                LoadChannel(url, cluster, lambda: b"news", heard.append, lambda: True)
                for heard in ([], early, late)
            )
            tasks = [asyncio.create_task(each.run()) for each in (stays, listens)]
            await _tell(stays, early)
            await asyncio.to_thread(fail_over, old, new)
            name.target = new.port
            tasks.append(asyncio.create_task(comes.run()))
            await _tell(stays, late)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _tell(channel: LoadChannel, heard: list[bytes]) -> None:
    """Tell until another router has heard it."""
    async with asyncio.timeout(WAIT_S):
        while not heard:
            channel.wake()
            await asyncio.sleep(0.02)


async def _put(records: ResponseRecords, name: ResponseName, record: ResponseRecord) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await records.put(name, record)
                return
            except StoreAway:
                await asyncio.sleep(0.05)
