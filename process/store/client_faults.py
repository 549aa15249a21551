"""Waiting for the store's asyncio client (redis-py 8.1), which hides two things from its callers.

For a write to a connection that was reset, uvloop raises RuntimeError, and the client passes it on.
And before Python 3.12 `asyncio.wait_for`, which the client uses, may swallow a cancellation: a task
that continues after an answer must first ask whether it was cancelled meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from process.side_tasks import run_together

log = logging.getLogger(__name__)

T = TypeVar("T")


async def answer_of(asked: Awaitable[T]) -> T:
    """The store's answer. Raises RedisError or OSError, also if the connection was reset."""
    try:
        return await asked
    except RuntimeError as error:
        raise RedisConnectionError(f"the connection is gone: {error}") from error


async def drop_connections(client: Any) -> None:
    """Close idle connections after an error of the store, so that its name is looked up again.

    The client keeps a connection on which an error was the answer. A store that has become a
    replica answers every write so, while its name leads to the new primary already.
    """
    with suppress(RedisError, OSError):
        await answer_of(client.connection_pool.disconnect(inuse_connections=False))


async def keep_using(
    client: Any,
    works: Sequence[Callable[[], Awaitable[None]]],
    pause_s: float,
    on_away: Callable[[], None] = lambda: None,
) -> None:
    """Do all works, which use the store, until cancelled. While the store is away, call `on_away`
    and begin again after `pause_s`."""

    async def repeat(work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except (RedisError, OSError) as error:
                check_cancelled()
                log.debug("the store is away: %s", error)
                await drop_connections(client)
                on_away()
                await asyncio.sleep(pause_s)

    await run_together(*map(repeat, works))


def check_cancelled() -> None:
    """Raises CancelledError if the task is being cancelled."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
