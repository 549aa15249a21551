"""A ZeroMQ socket on the event loop, as cheap as it can be: no task, no future for a message.

Owns the socket and its place in the loop. What has come is taken in one turn, what one turn sends
leaves together in the next: each by itself would wake ZeroMQ's own thread, which costs more than
all that the router does with a message. Knows nothing of messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

MAX_AT_ONCE = 64
RETRY_S = 0.01
_NOWAIT = int(zmq.NOBLOCK)


class FrameSocket:
    """`take` gets the frames of every message; what it raises, or the socket, goes to `fail`, once.

    ZeroMQ tells that messages came by a readable descriptor, but only until any other call has
    noticed them, too. So whoever looks takes all, and sending looks.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        take: Callable[[list[bytes]], None],
        fail: Callable[[Exception], object],
        max_queued: int,
    ) -> None:
        """`socket` is connected, or is about to be, and is served from now on. No more than
        `max_queued` messages wait to be sent."""
        self._socket = socket
        self._take = take
        self._fail = fail
        self._max_queued = max_queued
        self._outbox: list[bytes] = []
        self._retry: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._receive)
        self._loop.call_soon(self._receive)

    def send(self, frame: bytes) -> bool:
        """Send a message of one frame, soon; False if too many wait already."""
        outbox = self._outbox
        if not outbox:
            self._loop.call_soon(self._flush)
        elif len(outbox) >= self._max_queued:
            return False
        outbox.append(frame)
        return True

    def take_all(self) -> None:
        """Take everything that has come, however much it is."""
        while self._take_some():
            pass

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what was sent has `linger_ms` to leave. May be called twice."""
        if self._is_closed:
            return
        self._send_waiting()
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=linger_ms)

    def _receive(self) -> None:
        """Take what has come, some of it at a time, so that others have their turn."""
        if self._take_some():
            self._loop.call_soon(self._receive)

    def _take_some(self) -> bool:
        """Whether there may be more."""
        receive = self._socket.recv_multipart
        try:
            for _ in range(MAX_AT_ONCE):
                if self._is_closed:
                    return False
                try:
                    frames = receive(_NOWAIT)
                except zmq.Again:
                    return False
                self._take(frames)
        except Exception as error:  # noqa: BLE001 - the top: ends what this socket is for
            self._fail(error)
            return False
        return True

    def _flush(self) -> None:
        if self._is_closed:
            return
        self._retry = None
        self._send_waiting()
        if self._outbox:  # the peer takes nothing now
            self._retry = self._loop.call_later(RETRY_S, self._flush)
        self._receive()

    def _send_waiting(self) -> None:
        """As much as ZeroMQ takes."""
        outbox, num_sent = self._outbox, 0
        try:
            for frame in outbox:
                self._socket.send(frame, _NOWAIT)
                num_sent += 1
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            self._fail(error)
        del outbox[:num_sent]
