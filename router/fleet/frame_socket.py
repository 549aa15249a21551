"""A ZeroMQ socket on the event loop at minimal cost: no task or future per message.

Owns the socket and its reader callback in the loop. Received messages are taken in batches, one in
each turn of the loop; messages sent in one turn leave together in the next. Sending each one alone
would wake ZeroMQ's own thread, which costs more than the router's work on a message. Knows nothing
of what messages contain.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq
from zmq.backend import zmq_poll

from process.sockets.inflow import wire_bytes

MAX_AT_ONCE = 64
MAX_TURN_S = 0.005
RETRY_S = 0.01
MAX_FINISH_S = 5.0
MAX_FINISH_BYTES = 256 * 1024 * 1024
_NOWAIT = int(zmq.NOBLOCK)
_clock = time.perf_counter


@dataclass(slots=True)
class _Finish:
    """A socket that takes its last messages: the callback that follows, and the limits on time and
    bytes."""

    then: Callable[[], object]
    ends_at: float
    bytes_left: int

    def is_overdue(self, now: float) -> bool:
        return self.bytes_left < 0 or now > self.ends_at


class FrameSocket:
    """Passes the frames of every message to `take`; an error of `take` or of the socket goes to
    `fail`, once.

    `take` may return an iterator with the rest of its work. It runs step by step, in later turns if
    necessary, and always before the next message is taken.

    ZeroMQ signals new messages with a readable descriptor, but any other call on the socket resets
    that signal. So every reader takes all messages, and sending also reads.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        take: Callable[[list[bytes]], Iterator[None] | None],
        fail: Callable[[Exception], object],
        max_queued: int,
    ) -> None:
        """Serve `socket`, which is connected or about to be. At most `max_queued` messages wait to
        be sent."""
        self.bytes_taken = 0
        """The bytes that all taken messages had on the wire."""
        self._socket = socket
        self._polled = [(socket, int(zmq.POLLIN))]
        self._take = take
        self._fail = fail
        self._max_queued = max_queued
        self._rest: Iterator[None] | None = None
        self._outbox: list[list[bytes]] = []
        self._retry: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._is_receiving = True
        self._finish: _Finish | None = None
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._receive)
        self._loop.call_soon(self._receive_more)

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message, in frames, for the next turn; False if the queue is full."""
        outbox = self._outbox
        if not outbox:
            self._loop.call_soon(self._flush)
        elif len(outbox) >= self._max_queued:
            return False
        outbox.append(frames)
        return True

    def finish(self, then: Callable[[], object]) -> None:
        """Take the messages that have arrived, in batches as usual, and then call `then`. A peer
        that sent very many does not delay that for long: after MAX_FINISH_S or MAX_FINISH_BYTES the
        rest is dropped. `then` is not called if an error or `close` comes first."""
        take = self._take
        finish = _Finish(then, _clock() + MAX_FINISH_S, MAX_FINISH_BYTES)

        def count_and_take(frames: list[bytes]) -> Iterator[None] | None:
            finish.bytes_left -= sum(map(len, frames))
            return take(frames)

        self._take, self._finish = count_and_take, finish
        self._receive()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; sent messages have `linger_ms` to leave. May be called twice."""
        if self._is_closed:
            return
        self._send_waiting()
        self._is_closed = True
        self._finish = None
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=linger_ms)

    def _receive(self) -> None:
        """Take received messages in batches, bounded in number and time, so that other callbacks
        get their turn: one batch in each turn of the loop, until there are no more."""
        if self._is_receiving:
            return
        may_be_more = self._take_some()
        finish = self._finish
        if finish is not None and (not may_be_more or finish.is_overdue(_clock())):
            self._finish = None
            finish.then()
        elif may_be_more:
            self._is_receiving = True
            self._loop.call_soon(self._receive_more)

    def _receive_more(self) -> None:
        self._is_receiving = False
        self._receive()

    def _take_some(self) -> bool:
        """Take up to MAX_AT_ONCE messages for at most MAX_TURN_S; returns whether there may be
        more."""
        end = _clock() + MAX_TURN_S
        try:
            for _ in range(MAX_AT_ONCE):
                if self._is_closed:
                    return False
                if self._rest is None:
                    if not zmq_poll(self._polled, 0):
                        return False  # asking costs a quarter of the exception that says so
                    self._rest = self._take(self._next_frames())
                if self._rest is not None and not self._finish_rest(end):
                    return True
                if _clock() > end:
                    return True
        except Exception as error:  # noqa: BLE001 - the top: `fail` ends the socket's session
            self._rest = self._finish = None
            self._fail(error)
            return False
        return True

    def _finish_rest(self, end: float) -> bool:
        """Continue with the rest of a message until `end`; returns whether it is done."""
        assert self._rest is not None
        for _ in self._rest:
            if _clock() > end or self._is_closed:
                return False
        self._rest = None
        return True

    def _next_frames(self) -> list[bytes]:
        """The frames of the next message, which has arrived. Nearly every message is one frame. The
        frame itself says whether more follow; asking the socket would cost as much as receiving.
        """
        frame = self._socket.recv(_NOWAIT, copy=False)
        frames = [frame.bytes]
        self.bytes_taken += wire_bytes(len(frame))
        while frame.more:
            frame = self._socket.recv(_NOWAIT, copy=False)
            frames.append(frame.bytes)
            self.bytes_taken += wire_bytes(len(frame))
        return frames

    def _flush(self) -> None:
        if self._is_closed:
            return
        self._retry = None
        self._send_waiting()
        if self._outbox:  # the peer accepts nothing for now
            self._retry = self._loop.call_later(RETRY_S, self._flush)
        self._receive()

    def _send_waiting(self) -> None:
        """Send as many queued messages as ZeroMQ accepts."""
        outbox, num_sent = self._outbox, 0
        try:
            for frames in outbox:
                if len(frames) == 1:  # cheaper, and by far the most common
                    self._socket.send(frames[0], _NOWAIT)
                else:
                    self._socket.send_multipart(frames, _NOWAIT)
                num_sent += 1
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            self._fail(error)
        del outbox[:num_sent]
