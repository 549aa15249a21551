"""The client's connection during its answer: noticing its end, writing without ASGI messages.

The server's protocol puts the connection into the ASGI scope. ASGI's own messages would cost one
more task per request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from starlette.types import Scope

_T = TypeVar("_T")
_KEY = "baton.connection"


class ClientGone(Exception):
    """The client closed its connection, so there is no one to answer."""


class ClientConnection(Protocol):
    """An HTTP/1.1 connection; implemented by `gateway.http.connection`."""

    @property
    def is_lost(self) -> bool:
        """Whether the client is gone."""
        ...

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Call `on_lost` once when the client leaves; replaces any earlier callback."""
        ...

    def unwatch(self, on_lost: Callable[[], object]) -> None:
        """Stop calling `on_lost`. A callback that the connection's next request has set in the
        meantime stays."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether the client reads too slowly, so that further writes only fill the buffer."""
        ...

    async def wait_writable(self) -> None:
        """Wait until the connection is not paused, or is lost."""
        ...

    def write_chunk(self, data: bytes) -> None:
        """Write a chunk of an answer that has begun, without content-length. Never waits."""
        ...

    def has_body(self, scope: Scope) -> bool:
        """Whether the whole body of this scope's request has arrived, even if it was taken
        since."""
        ...

    def try_body(self, scope: Scope) -> bytes | None:
        """The body of this scope's request if it is complete. It can be taken once."""
        ...

    def try_answer(self, scope: Scope, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Answer this scope's request with 200, headers without line breaks, and a body. False if
        the caller must use ASGI's `send`: writing must wait, or the answer has begun."""
        ...


def offer_connection(scope: Any, connection: ClientConnection) -> None:
    """Put the connection into the scope of a request, for the code that answers."""
    scope[_KEY] = connection


def connection_of(scope: Scope) -> ClientConnection:
    """The connection that `offer_connection` put into the scope."""
    connection: ClientConnection = scope[_KEY]
    return connection


async def while_connected(connection: ClientConnection, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled and awaited if the client leaves first.

    The request's body must have been read before. Raises ClientGone, or any error of `work`.
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
