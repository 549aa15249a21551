"""Clients that send nothing more: each has either left, or waits for the answer to its request.

A client that closes its connection and one that closes only its own half (`nc -N`,
`shutdown(SHUT_WR)`) look the same. But the host of a client that has left answers every byte with a
reset. So the answer is begun at once, one byte at a time, with bytes that every answer begins with:
all status lines begin alike, and the size of a chunk may begin with zeros. A waiting client sees a
slow answer. Interim responses (1xx) would do as well, but HTTP/1.0 has none, and clients that did
not ask for one may take it for the answer.

Over TLS the event loop treats the end of a client's data as the end of the connection. Knows
nothing of requests except how much of an answer was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable
from typing import Any, Protocol

STATUS_START = b"HTTP/1.1 "
PROBE_DELAYS_S = (0.0, 0.25, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds between two bytes. A client's host answers the first byte; a proxy that copies bytes
notices with its second write to the client, and tells us with our next byte."""
_CAN_WATCH = hasattr(select, "epoll")


class UnreadConnection(Protocol):
    """A connection that may have to wait before it is read; used by `Peers`."""

    def on_peer_ended(self) -> None:
        """Note that the client sends nothing more."""
        ...

    def on_peer_gone(self) -> None:
        """Note that the client has reset the connection."""
        ...


class Peers:
    """Watches the clients of connections that the event loop does not read. Linux only. Owns an
    epoll instance, which the event loop watches, from the first connection until `close`."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._watched: dict[int, UnreadConnection] = {}
        self._fds: dict[UnreadConnection, int] = {}

    def try_watch_end(self, connection: UnreadConnection, transport: asyncio.Transport) -> bool:
        """Notify the connection once when its client sends nothing more or has left. False if this
        system cannot report that."""
        return _CAN_WATCH and self._try_watch(connection, transport, select.EPOLLRDHUP)

    def try_watch_reset(self, connection: UnreadConnection, transport: asyncio.Transport) -> bool:
        """Notify the connection once when its client, which sends nothing more, has left. False if
        this system cannot report that."""
        return _CAN_WATCH and self._try_watch(connection, transport, 0)

    def forget(self, connection: UnreadConnection) -> None:
        """Stop watching this connection; its socket may be closed."""
        fd = self._fds.pop(connection, None)
        if fd is None or self._watched.get(fd) is not connection:
            return  # the descriptor belongs to another connection by now
        del self._watched[fd]
        assert self._epoll is not None
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)

    def close(self) -> None:
        """Stop watching all connections."""
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
        self._watched.clear()
        self._fds.clear()

    def _try_watch(
        self, connection: UnreadConnection, transport: asyncio.Transport, events: int
    ) -> bool:
        client = transport.get_extra_info("socket")
        if client is None:
            return False
        if self._epoll is None:
            self._epoll = select.epoll()
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._on_events)
        self.forget(connection)
        fd = client.fileno()
        self._watched[fd] = connection
        self._fds[connection] = fd
        self._epoll.register(fd, events | select.EPOLLONESHOT)  # resets are always reported
        return True

    def _on_events(self) -> None:
        assert self._epoll is not None
        for fd, events in self._epoll.poll(0):
            connection = self._watched.get(fd)
            if connection is None:
                continue
            self.forget(connection)
            if events & (select.EPOLLHUP | select.EPOLLERR):
                connection.on_peer_gone()
            else:
                connection.on_peer_ended()


class Answer(Protocol):
    """How much of an answer was written; implemented by `Exchange`."""

    is_begun: bool
    is_complete: bool
    is_chunked: bool


class LateAnswers:
    """The transport of a connection whose client sends nothing more, for the code that writes
    answers.

    Begins the answer that `running` returns, as the module describes, and leaves the bytes already
    sent out of the first write. If the client's host does not confirm bytes for `give_up_s`, the
    connection ends.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        running: Callable[[], Answer | None],
        give_up_s: float,
    ) -> None:
        self._transport = transport
        self._running: Callable[[], Answer | None] = running
        self._num_begun = 0
        self._delays = iter(PROBE_DELAYS_S)
        self._timer: asyncio.TimerHandle | None = None
        transport.get_extra_info("socket").setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(give_up_s * 1000)
        )
        self._schedule()

    def write(self, data: bytes) -> None:
        """Write the next bytes of an answer, except those already sent."""
        begun, self._num_begun = self._num_begun, 0
        self._transport.write(data[begun:] if begun else data)

    def stop(self) -> None:
        """Begin no more answers."""
        self._running = _nothing
        if self._timer is not None:
            self._timer.cancel()

    def __getattr__(self, name: str) -> Any:
        """All other attributes are those of the transport."""
        return getattr(self._transport, name)

    def _schedule(self) -> None:
        delay = next(self._delays, None)
        if delay is not None:
            self._timer = asyncio.get_running_loop().call_later(delay, self._probe)

    def _probe(self) -> None:
        answer = self._running()
        if answer is not None and not answer.is_begun:
            self._transport.write(STATUS_START[self._num_begun : self._num_begun + 1])
            self._num_begun += 1
        elif answer is not None and answer.is_chunked and not answer.is_complete:
            self._transport.write(b"0")
        self._schedule()


def _nothing() -> None:
    """Stands for `running` after `stop`: no answer is running."""
