"""A watcher of the fleet, and what it announces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from process.store.fleet_watcher import FleetWatcher
from protocol.registration import WorkerInfo

WAIT_S = 60.0


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


async def change(changes: asyncio.Queue) -> dict[str, WorkerInfo]:
    return await asyncio.wait_for(changes.get(), WAIT_S)
