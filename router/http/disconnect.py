"""The client's connection while its answer is being made: noticing its end, writing past ASGI.

The server's protocol offers it in the ASGI scope; the same by ASGI's own messages would cost a task
more for each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from starlette.types import Scope

_T = TypeVar("_T")
_KEY = "baton.connection"


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class ClientConnection(Protocol):
    """An HTTP/1.1 connection as `router.http.connection` implements it."""

    @property
    def is_lost(self) -> bool:
        """Whether the client is gone."""
        ...

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Call this, and nobody else, once when the client goes."""
        ...

    def unwatch(self, on_lost: Callable[[], object]) -> None:
        """Do not call this any more. Whoever answers the connection's next request may have begun
        to watch in the meantime, and goes on."""
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

    def try_body(self, scope: Scope) -> bytes | None:
        """The body of this scope's request, once, if all of it has come."""
        ...

    def try_answer(self, scope: Scope, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Answer this scope's request with 200, headers that hold no line breaks, and a body;
        False if it takes ASGI's `send`, because it must wait, or something was sent."""
        ...


def offer_connection(scope: Any, connection: ClientConnection) -> None:
    """Make the connection known to whoever answers the request of this scope."""
    scope[_KEY] = connection


def connection_of(scope: Scope) -> ClientConnection:
    """The connection that was offered."""
    connection: ClientConnection = scope[_KEY]
    return connection


async def while_connected(connection: ClientConnection, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled and waited for if the client leaves first.

    The request's body must have been read. Raises ClientGone, or what `work` raises.
    """
    task = asyncio.current_task()
    assert task is not None
    if connection.is_lost:
        work.close()
        raise ClientGone
    on_lost = task.cancel
    connection.watch(on_lost)
    try:
        return await work
    except asyncio.CancelledError:
        if not connection.is_lost:
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        connection.unwatch(on_lost)
