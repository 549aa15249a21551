"""Counts the bytes that the peers of one ZeroMQ socket have sent and that were not read. If they
are too many, ends the connection with the most.

ZeroMQ bounds how many messages wait, not how many bytes, and a message counts only when its last
frame has come. So the kernel's count of the bytes that came over each connection is compared with
the bytes that the reader took. Any thread may call any method. On systems other than Linux, whose
kernels do not count, no connection is ended.
"""

from __future__ import annotations

import logging
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import zmq

log = logging.getLogger(__name__)

CHECK_S = 0.25
DESCRIPTOR = "__fd"
"""The property of a received frame that holds its connection's file descriptor."""
OPENED = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
CONNECTION_EVENTS = OPENED | zmq.EVENT_DISCONNECTED
"""The events of a monitor that `Inflow.note` takes."""
_RECEIVED_AT = 128
"""The offset of `tcpi_bytes_received`, a 64-bit number, in `struct tcp_info`."""
_HANDSHAKE_BYTES = 1024
_HEARTBEAT_BYTES_PER_S = 128
"""Bytes a second that ZeroMQ itself may read: a ping and a pong have 82 on the wire."""
_CURVE_BYTES = 33
_SHORT_FRAME = 255
_Name = tuple[str, int]


def wire_bytes(num_bytes: int) -> int:
    """The bytes on the wire of a frame of `num_bytes`: encrypted by CURVE, behind ZMTP's header."""
    encrypted = num_bytes + _CURVE_BYTES
    return encrypted + (2 if encrypted <= _SHORT_FRAME else 9)


def next_frames(router: zmq.Socket[bytes], inflow: Inflow) -> list[bytes]:
    """The sender's identity and the frames of the next message at a ROUTER, whose `inflow` is told
    of them. Raises Again."""
    frame = router.recv(zmq.NOBLOCK, copy=False)
    descriptor = int(frame.get(DESCRIPTOR))
    frames, num_bytes = [frame.bytes], 0
    while frame.more:
        frame = router.recv(zmq.NOBLOCK, copy=False)
        frames.append(frame.bytes)
        num_bytes += wire_bytes(len(frame))
    inflow.took(descriptor, num_bytes)
    return frames


@dataclass(eq=False, slots=True)
class _Connection:
    name: _Name
    opened_at: float
    taken: int = 0


class Inflow:
    """The connections of one socket, by file descriptor. Together they may have at most `max_bytes`
    unread bytes (None: any number); `num_ended` counts the connections that were ended for more."""

    def __init__(
        self, max_bytes: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_ended = 0
        self._max_bytes = max_bytes
        self._clock = clock
        self._connections: dict[int, _Connection] = {}
        self._total_taken = 0

    @property
    def num_open(self) -> int:
        """Open connections, as far as they are bounded."""
        return 0 if self._max_bytes is None else len(self._connections)

    def note(self, event: int, descriptor: int) -> None:
        """Take a monitor's event: a connection was opened or closed."""
        if event == zmq.EVENT_DISCONNECTED:
            self._connections.pop(descriptor, None)
        elif event & OPENED:
            self._open(descriptor)

    def _open(self, descriptor: int) -> None:
        name = _name_of(descriptor)
        known = self._connections.get(descriptor)
        if name is not None and (known is None or known.name != name):
            self._connections[descriptor] = _Connection(name, self._clock())

    def took(self, descriptor: int, num_bytes: int) -> None:
        """Note that the reader took a message of `num_bytes` (see `wire_bytes`) from a
        connection."""
        known = self._connections.get(descriptor)
        if known is None:
            self._open(descriptor)
            known = self._connections.get(descriptor)
        if known is not None:
            known.taken += num_bytes

    def took_in_all(self, num_bytes: int) -> None:
        """Note that the reader has taken `num_bytes` so far, from a socket with one connection at a
        time."""
        if self._connections:
            latest = next(reversed(self._connections.values()))
            latest.taken += num_bytes - self._total_taken
        self._total_taken = num_bytes

    def check(self) -> bool:
        """End the connections with the most unread bytes until the rest is within the limit.
        Returns whether one was ended. Call it every `CHECK_S`."""
        if self._max_bytes is None:
            return False
        unread = self.unread()
        num_before = self.num_ended
        while sum(unread.values()) > self._max_bytes:
            worst = max(unread, key=unread.__getitem__)
            self._end(worst, unread.pop(worst))
        return self.num_ended > num_before

    def unread(self) -> dict[int, int]:
        """The number of bytes that came over each open connection and were not taken, by
        descriptor."""
        unread: dict[int, int] = {}
        for descriptor, each in list(self._connections.items()):
            received = _received(descriptor, each.name)
            if received is None:
                self._connections.pop(descriptor, None)
                continue
            age_s = self._clock() - each.opened_at
            left_out = each.taken + _HANDSHAKE_BYTES + _HEARTBEAT_BYTES_PER_S * age_s
            unread[descriptor] = max(0, received - int(left_out))
        return unread

    def _end(self, descriptor: int, num_bytes: int) -> None:
        connection = self._connections.pop(descriptor, None)
        if connection is None or not _shut(descriptor, connection.name):
            return
        self.num_ended += 1
        if self.num_ended.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...: bounded logs
            log.warning(
                "ended a connection with %s:%d, which sent %d bytes that were not a whole message "
                "or could not be read in time (%d so far)",
                *connection.name, num_bytes, self.num_ended,
            )  # fmt: skip


def _name_of(descriptor: int) -> _Name | None:
    """The peer's address and port; None if there is no such connection any more."""
    try:
        with _borrowed(descriptor) as peer:
            host, port, *_ = peer.getpeername()
    except (OSError, ValueError):
        return None
    return host, port


def _received(descriptor: int, name: _Name) -> int | None:
    """The bytes that came over a connection; None if the descriptor belongs to another one by
    now."""
    if _name_of(descriptor) != name:
        return None
    if sys.platform != "linux":
        return 0
    try:
        with _borrowed(descriptor) as peer:
            info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
    except OSError:
        return None
    return struct.unpack_from("Q", info, _RECEIVED_AT)[0] if len(info) == _RECEIVED_AT + 8 else 0


def _shut(descriptor: int, name: _Name) -> bool:
    """Shut a connection down; ZeroMQ then closes it. A copy of the descriptor makes sure that the
    connection is still the same."""
    try:
        with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as copy:
            if _name_of(copy.fileno()) != name:
                return False
            copy.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def shut_accepted(descriptor: int, endpoint: str) -> None:
    """Shut down a connection that the listener at `endpoint` accepted; ZeroMQ then closes it. A
    descriptor that belongs to something else by now is left alone. Needs no free descriptor."""
    port = int(endpoint.rpartition(":")[2])
    with suppress(OSError, ValueError), _borrowed(descriptor) as peer:
        if peer.getsockname()[1] == port:
            peer.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """ZeroMQ's own descriptor as a socket, which also reads addresses of IPv6. Raises OSError."""
    peer = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield peer
    finally:
        peer.detach()
