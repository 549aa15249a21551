"""A router as a process of its own, its workers and its clients."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import zmq.asyncio

from cli.child import Child
from process.sockets.encrypted_sockets import Network
from process.store.embedded_valkey import EmbeddedValkey
from process.store.worker_lease import WorkerLease
from protocol.messages import Generate, Role
from tests.forked import ForkedChild
from tests.unit.router.fake_worker import SECRET, WAIT_S, FakeWorker


@dataclass
class RouterProcess:
    process: Child
    client: httpx.AsyncClient
    log: Path

    was_told: bool = False

    def tell_to_stop(self) -> None:
        """Once: a second signal would end it at once."""
        if not self.was_told and self.process.is_running():
            self.was_told = True
            self.process.signal(signal.SIGTERM)

    async def stop(self) -> int | None:
        self.tell_to_stop()
        return await self.ended()

    async def ended(self) -> int | None:
        """Its exit status, once it has ended."""
        assert await asyncio.to_thread(self.process.wait, WAIT_S), self.log.read_text()
        return self.process.exit_status()


def fork(log: Path, *flags: str, **environment: str) -> Child:
    command = [sys.executable, "-m", "router_process.main", *flags]
    child = ForkedChild("router", Role.ROUTER, command, {**os.environ, **environment}, log)
    child.start()
    return child


@asynccontextmanager
async def registered(valkey: EmbeddedValkey, cluster: str, **info) -> AsyncIterator[FakeWorker]:
    """A decode worker in the cluster of `router`."""
    network = Network(SECRET, zmq.asyncio.Context())
    made = FakeWorker(network, role=Role.DECODE, **info)
    lease = WorkerLease(valkey.url, cluster, made.info, WAIT_S)
    lease.start()
    yield made
    await asyncio.to_thread(lease.close)
    await made.close()
    network.close()


async def healthy(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await client.get("/health")).status_code != 200:
            await asyncio.sleep(0.02)


async def serve(worker: FakeWorker, token_ids: list[int], **fields) -> Generate:
    """The first tokens of the next request: an answer begins with them, not before."""
    leg = await worker.received.next(Generate)
    worker.tokens(leg, 0, token_ids, **fields)
    return leg


COMPLETION = {"model": "model", "prompt": "Hello world", "max_tokens": 3, "stream": True}
