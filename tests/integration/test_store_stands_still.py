"""Processes that stop while the store accepts connections and answers nothing (SIGSTOP)."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import redis
import redis.asyncio.client

from process.store.embedded_valkey import EmbeddedValkey
from process.store.fleet_watcher import FleetWatcher
from process.store.router_board import RouterBoard
from process.store.router_leases import RouterLease
from process.store.worker_lease import WorkerLease
from tests.registration import registration

WAIT_S = 60.0
LEASE_S = 2.0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("process.store.embedded_valkey._STOP_WAIT_S", 0.1)
    with EmbeddedValkey() as valkey:
        yield valkey


async def test_a_router_ends_its_work_with_the_store(store: EmbeddedValkey, cluster: str) -> None:
    """It can neither give up its lease nor take its summary away: both expire."""
    watcher = FleetWatcher(store.url, cluster, lambda members: None)
    board = RouterBoard(store.url, cluster, lambda: b"", lambda peers: None, lambda question: None)
    lease = RouterLease(store.url, cluster, "one")
    tasks = [asyncio.create_task(each.run()) for each in (watcher, board, lease)]
    with redis.Redis.from_url(store.url) as client:
        async with asyncio.timeout(WAIT_S):
            while not (
                watcher.is_connected
                and client.exists(f"baton:{cluster}:router_lease:one")
                and client.exists(f"baton:{cluster}:routers")
            ):
                await asyncio.sleep(0.01)
    os.kill(store.pid, signal.SIGSTOP)
    for task in tasks:
        task.cancel()
    _, running = await asyncio.wait(tasks, timeout=WAIT_S)
    assert not running
    assert [task.cancelled() for task in tasks] == [True] * 3


@pytest.mark.parametrize("error", [None, redis.ConnectionError("reset")])
async def test_a_watcher_ends_although_its_client_swallows_the_cancellation(
    monkeypatch: pytest.MonkeyPatch, store: EmbeddedValkey, cluster: str, error: Exception | None
) -> None:
    """As `asyncio.wait_for` may before Python 3.12. What the watcher asks next finds no answer."""
    waits = asyncio.Event()

    async def get_message(channel: object, timeout: float) -> None:
        waits.set()
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            os.kill(store.pid, signal.SIGSTOP)
            if error is not None:
                raise error from None

    monkeypatch.setattr(redis.asyncio.client.PubSub, "get_message", get_message)
    watcher = asyncio.create_task(FleetWatcher(store.url, cluster, lambda members: None).run())
    async with asyncio.timeout(WAIT_S):
        await waits.wait()
    watcher.cancel()
    await asyncio.wait([watcher], timeout=WAIT_S)
    assert watcher.cancelled()


async def test_a_worker_ends_its_lease(
    store: EmbeddedValkey, cluster: str, caplog: pytest.LogCaptureFixture
) -> None:
    lease = WorkerLease(store.url, cluster, registration("a"), LEASE_S)
    lease.start()
    assert await asyncio.to_thread(lease.wait_registered, WAIT_S)
    os.kill(store.pid, signal.SIGSTOP)
    async with asyncio.timeout(WAIT_S):
        await asyncio.to_thread(lease.close)
    assert "could not leave the fleet; the lease will expire" in caplog.text
