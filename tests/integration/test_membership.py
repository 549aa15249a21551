"""Membership against a real Valkey: leases that live, end, lapse, and a store that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import redis

from cli.main import main as baton
from process.store.drain_requests import request_drain, request_resume
from process.store.embedded_valkey import EmbeddedValkey
from process.store.fleet_watcher import FleetWatcher, read_fleet
from process.store.ignored_entries import REGISTRATION, IgnoredEntries
from process.store.registry import Registry
from process.store.worker_lease import WorkerLease
from protocol import wire
from protocol.errors import ServiceError
from protocol.registration import WorkerInfo, WorkerState
from tests.effort import some
from tests.garbage import GARBAGE, keys_of, spoil
from tests.integration.lease_holder import LONG_S, renewed
from tests.registration import registration

STORE_LEASE_S = 6.0  # where the store stands still: half of it a lease waits for an answer
WAIT_S = 60.0
POLL_S = 0.005
NUM_RESETS = 30
PAUSE = threading.Event()


def until(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline, "waited in vain"
        PAUSE.wait(POLL_S)


@asynccontextmanager
async def watching(url: str, cluster: str, **options) -> AsyncIterator[tuple]:
    """A running watcher and a queue of every fleet that it announced."""
    changes: asyncio.Queue = asyncio.Queue()
    watcher = FleetWatcher(
        url, cluster, lambda members: changes.put_nowait(dict(members)), poll_s=0.1, **options
    )
    task = asyncio.create_task(watcher.run())
    try:
        yield watcher, changes
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


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


async def change(changes: asyncio.Queue) -> dict[str, WorkerInfo]:
    return await asyncio.wait_for(changes.get(), WAIT_S)


# -- leases -------------------------------------------------------------------------------------


def test_a_worker_registers_renews_and_leaves(valkey, cluster, leases) -> None:
    lease_ms = int(LONG_S * 1000)
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)
    assert read_fleet(valkey.url, cluster) == {"a": registration("a")}
    with redis.Redis.from_url(valkey.url) as client:
        key = Registry(cluster).worker_key("a")
        assert 0 < client.pttl(key) <= lease_ms
        shorter_ms = lease_ms // 2
        client.pexpire(key, shorter_ms)
        until(lambda: renewed(lease) and client.pttl(key) > shorter_ms)
    lease.close()
    assert read_fleet(valkey.url, cluster) == {}
    assert (lease.lapses, lease.refusal) == (0, None)


def test_a_registration_ends_by_itself_when_nobody_renews_it(valkey, cluster, leases) -> None:
    info = registration("a")
    with redis.Redis.from_url(valkey.url) as client:
        client.eval(*Registry(cluster).claim(info, LONG_S))
        assert read_fleet(valkey.url, cluster) == {"a": info}
        key = Registry(cluster).worker_key("a")
        assert 0 < client.pttl(key) <= 1000 * LONG_S
        client.pexpire(key, 1)
        until(lambda: read_fleet(valkey.url, cluster) == {})
        assert client.smembers(Registry(cluster).workers_key) == set(), "and no id is left over"


def test_a_new_state_is_announced(valkey, cluster, leases) -> None:
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)
    lease.update(WorkerState.DRAINING)
    draining = msgspec.structs.replace(registration("a"), state=WorkerState.DRAINING)
    until(lambda: read_fleet(valkey.url, cluster) == {"a": draining})


def test_the_phases_of_a_start_are_announced_once_it_is_over(valkey, cluster) -> None:
    lease = WorkerLease(valkey.url, cluster, registration("a"), LONG_S)
    told: list[dict[str, WorkerInfo]] = []

    def on_registered() -> None:
        told.append(dict(read_fleet(valkey.url, cluster)))
        lease.note_start({"weights": 8000, "registration": 20})

    lease.start(on_registered)
    try:
        until(lambda: told)
        assert told == [{"a": registration("a")}], "registered by then"
        started = msgspec.structs.replace(
            registration("a"), start_ms={"weights": 8000, "registration": 20}
        )
        until(lambda: read_fleet(valkey.url, cluster) == {"a": started})
    finally:
        lease.close()
    assert len(told) == 1


def test_after_a_lapse_a_worker_comes_back_as_another_and_not_by_itself(
    valkey, cluster, leases, caplog
) -> None:
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)
    assert time.monotonic() < lease.holds_until() <= time.monotonic() + LONG_S
    with redis.Redis.from_url(valkey.url) as client:
        client.delete(Registry(cluster).worker_key("a"))
    until(lambda: renewed(lease) and lease.has_lapsed)
    held_until = lease.holds_until()
    assert read_fleet(valkey.url, cluster) == {}
    assert lease.holds_until() == held_until, "nothing is renewed meanwhile"
    lease.register_again("life-2")
    until(lambda: read_fleet(valkey.url, cluster) == {"a": registration("a", "life-2")})
    assert (lease.lapses, lease.has_lapsed, lease.refusal) == (1, False, None)
    assert "the lease of a ended early: the store's clock was set forward" in caplog.text


def test_a_worker_that_comes_back_at_once_has_lapsed_once(valkey, cluster, leases) -> None:
    """The owner's thread may see that it lapsed before the lease's thread has said so."""
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)

    class Hasty(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if lease.has_lapsed:
                lease.register_again(f"life-{lease.lapses + 1}")

    handler = Hasty()
    log = logging.getLogger("process.store.worker_lease")
    log.addHandler(handler)
    try:
        with redis.Redis.from_url(valkey.url) as client:
            client.delete(Registry(cluster).worker_key("a"))
        until(lambda: renewed(lease) and read_fleet(valkey.url, cluster))
    finally:
        log.removeHandler(handler)
    assert read_fleet(valkey.url, cluster) == {"a": registration("a", "life-2")}


def test_a_request_to_drain_reaches_the_incarnation_that_it_was_meant_for(
    valkey, cluster, leases
) -> None:
    flags = ["--redis-url", valkey.url, f"--cluster={cluster}", "--wait-s", "0"]
    assert baton(["drain", *flags, "a"]) == 1, "no such worker"
    former = leases(registration("a"))
    assert former.wait_registered(WAIT_S)
    assert baton(["drain", "a", *flags]) == 0
    until(lambda: renewed(former) and former.is_asked_to_drain)
    former.close()
    successor = leases(registration("a", "life-2"))
    assert successor.wait_registered(WAIT_S)
    assert not successor.is_asked_to_drain


def test_a_request_to_drain_can_be_taken_back(valkey, cluster, leases) -> None:
    assert request_resume(valkey.url, cluster, "a") is None
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)
    request_drain(valkey.url, cluster, "a")
    until(lambda: renewed(lease) and lease.is_asked_to_drain)
    assert request_resume(valkey.url, cluster, "a") == registration("a")
    until(lambda: renewed(lease) and not lease.is_asked_to_drain)


def test_whether_another_worker_is_alive(valkey, cluster, leases) -> None:
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)
    other = leases(registration("b", "life-7"))
    until(lambda: renewed(lease) and lease.is_alive("b", "life-7"))
    assert not lease.is_alive("b", "life-6")
    other.close()
    until(lambda: renewed(lease) and not lease.is_alive("b", "life-7"))


def test_clusters_do_not_see_each_other(valkey, cluster, leases) -> None:
    assert leases(registration("a")).wait_registered(WAIT_S)
    assert read_fleet(valkey.url, cluster + "x") == {}


def test_nobody_answers() -> None:
    with EmbeddedValkey() as gone:
        url = gone.url
    with pytest.raises(ServiceError, match=r"cannot read the fleet from redis://127\.0\.0\.1:\d+:"):
        read_fleet(url, "default", 1.0)
    lease = WorkerLease(url, "default", registration("a"), LONG_S)
    lease.start()
    assert not lease.wait_registered(0.3)
    assert lease.is_alive("b", "any"), "nothing shows that somebody is gone"
    lease.close()


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


@pytest.mark.parametrize("first", some(range(len(GARBAGE)), 4))
def test_a_worker_stays_in_the_fleet_whatever_the_store_holds(
    valkey, cluster, leases, first: int
) -> None:
    lease = leases(registration("a"))
    with redis.Redis.from_url(valkey.url) as client:
        spoil(client, keys_of(cluster, ["a"], []), first)
    until(lambda: renewed(lease) and "a" in read_fleet(valkey.url, cluster))
    assert (lease.refusal, lease.has_lapsed, lease.is_asked_to_drain) == (None, False, False)


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_registration_that_is_overwritten_is_restored(valkey, cluster, leases, kind: str) -> None:
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)
    with redis.Redis.from_url(valkey.url) as client:
        spoil(client, [Registry(cluster).worker_key("a")], list(GARBAGE).index(kind))
    until(lambda: renewed(lease) and "a" in read_fleet(valkey.url, cluster))
    assert (lease.refusal, lease.has_lapsed) == (None, False)


# -- a store that loses its memory or goes away -----------------------------------------------


async def test_nobody_is_lost_when_the_store_forgets_everything(valkey, cluster, leases) -> None:
    lease = leases(registration("a"))
    assert await asyncio.to_thread(lease.wait_registered, WAIT_S)
    async with watching(valkey.url, cluster, settle_s=WAIT_S) as (watcher, changes):
        assert await change(changes) == {"a": registration("a")}
        with redis.Redis.from_url(valkey.url) as client:
            client.flushall()
        await _until(lambda: renewed(lease) and lease.lapses == 1)
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
    await _until(lambda: renewed(lease) and read_fleet(valkey.url, cluster) == ours)
    assert (lease.lapses, lease.has_lapsed, lease.refusal) == (1, False, None)


async def test_a_store_that_is_killed_and_comes_back_empty(cluster) -> None:
    with EmbeddedValkey() as valkey:
        lease = WorkerLease(valkey.url, cluster, registration("a"), LONG_S)
        lease.start()
        async with watching(valkey.url, cluster, settle_s=WAIT_S) as (watcher, changes):
            assert await change(changes) == {"a": registration("a")}
            os.kill(valkey.pid, signal.SIGKILL)
            await _until(lambda: not watcher.is_connected)
            assert watcher.members == {"a": registration("a")}, "the last known fleet"
            await _until(lambda: renewed(lease) and lease.is_alive("other", "life"))
            await asyncio.to_thread(valkey.restart)
            await _until(lambda: watcher.is_connected)
            again = {"a": registration("a")}
            await asyncio.to_thread(until, lambda: read_fleet(valkey.url, cluster) == again)
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
            await _until(lambda: not watcher.is_connected)
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
            await _until(lambda: not watcher.is_connected)
            await _until(lambda: lease.is_alive("b", "any"))
            os.kill(valkey.pid, signal.SIGCONT)
            await _until(lambda: watcher.is_connected and not lease.is_alive("b", "any"))
            assert watcher.members == {"a": registration("a")}
            assert changes.empty()
        await asyncio.to_thread(lease.close)
        assert read_fleet(valkey.url, cluster) == {}


async def _until(check: Callable[[], object]) -> None:
    await asyncio.to_thread(until, check)
