"""The client's connection while its answer is being made: noticing its end, writing past ASGI.

A connection that offers itself in the ASGI scope is used directly; before any other server the
same is done by ASGI's own messages, which cost a task more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.types import Receive, Scope

_T = TypeVar("_T")
_KEY = "baton.connection"


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class ClientConnection(Protocol):
    """An HTTP/1.1 connection as `router.http_protocol` implements it."""

    @property
    def is_lost(self) -> bool:
        """Whether the client is gone."""
        ...

    def watch(self, on_lost: Callable[[], object] | None) -> None:
        """Call this, and nobody else, once when the client goes."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether the client reads too slowly: what is written now only piles up."""
        ...

    async def wait_writable(self) -> None:
        """Returns when it is not paused, or lost."""
        ...

    def write_chunk(self, data: bytes) -> None:
        """A piece of an answer's body that has begun, and has no content-length. Never waits."""
        ...


def offer_connection(scope: Any, connection: ClientConnection) -> None:
    """Make the connection known to whoever answers the request of this scope."""
    scope[_KEY] = connection


def connection_of(scope: Scope) -> ClientConnection | None:
    """The connection that was offered, if one was."""
    return scope.get(_KEY)


async def while_connected(scope: Scope, receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled and waited for if the client leaves first.

    The request's body must have been read. Raises ClientGone, or what `work` raises.
    """
    connection = connection_of(scope)
    if connection is None:
        return await _while_receiving(receive, work)
    task = asyncio.current_task()
    assert task is not None
    if connection.is_lost:
        work.close()
        raise ClientGone
    connection.watch(task.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if not connection.is_lost:
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        connection.watch(None)


async def _while_receiving(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (watcher, task):
            each.cancel()
        await asyncio.gather(watcher, task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
