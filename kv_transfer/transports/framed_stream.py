"""Frames over a Unix stream socket that never blocks: a length of 4 bytes, then the payload.

A frame may carry an open file to the peer. Knows nothing of the frames' meaning.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque

MAX_FRAME_BYTES = 64 * 1024
_LENGTH_BYTES = 4
_READ_BYTES = 256 * 1024
_READS = 8
_QUEUE_FULL = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS)


class FramedStream:
    """Owns a connected socket until `close`. No frame has more than `most_bytes`."""

    def __init__(self, connection: socket.socket, most_bytes: int = MAX_FRAME_BYTES) -> None:
        connection.setblocking(False)
        self._most_bytes = most_bytes
        self.socket = connection
        self.is_ended = False  # the peer closed it
        self._unsent: deque[bytes] = deque()
        self._num_sent = 0  # bytes of the first of them
        self._inbound = bytearray()

    def queue(self, payload: bytes) -> None:
        """Send a frame with one of the next calls of `flush`."""
        assert len(payload) <= self._most_bytes
        self._unsent.append(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)

    @property
    def has_unsent(self) -> bool:
        """Whether frames wait for the kernel to accept them."""
        return bool(self._unsent)

    def flush(self) -> int:
        """Give the kernel as many bytes as it accepts; returns the number of frames that this call
        completed. Raises OSError if the connection is broken."""
        done = 0
        while self._unsent:
            frame = self._unsent[0]
            try:
                self._num_sent += self.socket.send(memoryview(frame)[self._num_sent :])
            except OSError as error:
                if error.errno in _QUEUE_FULL:
                    break
                raise
            if self._num_sent == len(frame):
                self._unsent.popleft()
                self._num_sent = 0
                done += 1
        return done

    def send_file(self, payload: bytes, file: int) -> None:
        """Send a short frame with an open file at once. Raises OSError if the kernel does not
        accept it, which happens only while earlier frames are unsent."""
        frame = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload
        if self._unsent or socket.send_fds(self.socket, [frame], [file]) != len(frame):
            raise BlockingIOError(errno.EAGAIN, "the queue is full")

    def receive(self) -> list[bytes]:
        """The complete frames that have arrived; closes files that came with them. Raises OSError
        if the connection is broken or a frame is too long."""
        for _ in range(_READS):
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            self._inbound += data
            if not data:
                self.is_ended = True
                break
        return self._frames()

    def receive_file(self) -> tuple[list[bytes], int | None]:
        """As `receive`, with the first open file that came. The caller then owns the file."""
        try:
            data, files, _, _ = socket.recv_fds(self.socket, _READ_BYTES, 1)
        except BlockingIOError:
            return [], None
        self.is_ended = not data
        for file in files:
            os.set_inheritable(file, False)
        self._inbound += data
        try:
            return self._frames(), files[0] if files else None
        except OSError:
            for file in files:
                os.close(file)
            raise

    def close(self) -> None:
        """Close the socket. Unsent bytes are lost."""
        self.socket.close()

    def _frames(self) -> list[bytes]:
        frames = []
        start = 0
        while start + _LENGTH_BYTES <= len(self._inbound):
            body = start + _LENGTH_BYTES
            length = int.from_bytes(self._inbound[start:body], "little")
            if length > self._most_bytes:
                raise OSError(f"a frame of {length} bytes is too long")
            if body + length > len(self._inbound):
                break
            frames.append(bytes(self._inbound[body : body + length]))
            start = body + length
        del self._inbound[:start]
        return frames
