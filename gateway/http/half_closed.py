"""Clients that send nothing more: each is gone, or waits for the answer to what it has sent.

The end of what a client sends looks the same when it closes its connection and when it closes only
its own half (`nc -N`, `shutdown(SHUT_WR)`). But a client that is gone answers every byte with a
reset. So its answer is begun at once, with a byte at a time that it begins with in any case: all
status lines begin alike, and the size of a chunk may begin with zeros. A client that waits sees a
slow answer. Interim responses (1xx) would serve the same end, but HTTP/1.0 has none, and clients
that did not ask for one may take it for the answer.

Over TLS the end of what a client sends is the end of the connection, as the event loop has it.
Knows nothing of requests but how much of an answer was written.
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
"""Between one byte and the next. The first is answered by a client, later ones by proxies that
copy bytes: those notice with their second write to the client, and tell with our next one."""
_CAN_WATCH = hasattr(select, "epoll")


class UnreadConnection(Protocol):
    """A connection that may have to wait before it is read, as `Peers` sees it."""

    def on_peer_ended(self) -> None:
        """The client sends nothing more."""
        ...

    def on_peer_gone(self) -> None:
        """The client has reset the connection."""
        ...


class Peers:
    """Watches the clients of connections that the event loop does not read. Owns an epoll instance,
    which the event loop watches in turn, from the first connection until `close`. Only on Linux."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._watched: dict[int, UnreadConnection] = {}
        self._fds: dict[UnreadConnection, int] = {}

    def try_watch_end(self, connection: UnreadConnection, transport: asyncio.Transport) -> bool:
        """Tell the connection once when its client sends nothing more, or is gone. False if this
        system does not say so."""
        return _CAN_WATCH and self._try_watch(connection, transport, select.EPOLLRDHUP)

    def try_watch_reset(self, connection: UnreadConnection, transport: asyncio.Transport) -> bool:
        """Tell the connection once when its client, which sends nothing more, is gone. False as
        above."""
        return _CAN_WATCH and self._try_watch(connection, transport, 0)

    def forget(self, connection: UnreadConnection) -> None:
        """Watch this one no longer; its socket may be closed."""
        fd = self._fds.pop(connection, None)
        if fd is None or self._watched.get(fd) is not connection:
            return  # another one's, by now
        del self._watched[fd]
        assert self._epoll is not None
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)

    def close(self) -> None:
        """Watch nobody any longer."""
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
        self._epoll.register(fd, events | select.EPOLLONESHOT)  # resets are always told
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
    """How much of an answer was written, as uvicorn's cycle says it."""

    response_started: bool
    response_complete: bool
    chunked_encoding: bool | None


class LateAnswers:
    """The transport of a connection whose client sends nothing more, for what writes answers.

    Begins the answer that `running` names, as the module says; what was begun is left out of the
    first write. Bytes that the client's host does not confirm for `give_up_s` end the connection.
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
        """Write the next bytes of an answer, of which the first may be written."""
        begun, self._num_begun = self._num_begun, 0
        self._transport.write(data[begun:] if begun else data)

    def stop(self) -> None:
        """Begin no more answers."""
        self._running = _nothing
        if self._timer is not None:
            self._timer.cancel()

    def __getattr__(self, name: str) -> Any:
        """All else is the transport's."""
        return getattr(self._transport, name)

    def _schedule(self) -> None:
        delay = next(self._delays, None)
        if delay is not None:
            self._timer = asyncio.get_running_loop().call_later(delay, self._probe)

    def _probe(self) -> None:
        answer = self._running()
        if answer is not None and not answer.response_started:
            self._transport.write(STATUS_START[self._num_begun : self._num_begun + 1])
            self._num_begun += 1
        elif answer is not None and answer.chunked_encoding and not answer.response_complete:
            self._transport.write(b"0")
        self._schedule()


def _nothing() -> None:
    """What runs on a connection that is lost."""
