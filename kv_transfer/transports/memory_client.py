"""A peer's side: gets the memory of an owner's pool over a Unix socket, then sends notifications.

Owns one connection. Nothing blocks: `poll` takes the next step, so that a stopped owner delays
nobody else. The owner must prove the key before its file is mapped.
"""

from __future__ import annotations

import errno
import hmac
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable
from enum import Enum, auto

from kv_transfer.transports.framed_stream import FramedStream
from kv_transfer.transports.memory_file import map_shared
from kv_transfer.transports.memory_handshake import NONCE_BYTES, Handshake, stranger
from protocol.errors import TransferError

CONNECT_WAIT_S = 10.0


class _State(Enum):
    CONNECTING = auto()  # the owner's queue of connections is full
    CHALLENGED = auto()  # waits for the challenge
    PROVING = auto()  # waits for the owner's proof and the file
    OPEN = auto()
    ENDED = auto()


class MemoryClient:
    """A connection to an owner's `MemoryServer`. Once it is open, `memory` is the owner's
    memory."""

    def __init__(
        self,
        agent: str,
        address: str,
        key: bytes,
        num_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect as `agent`; the memory must have `num_bytes`. Raises TransferError if nobody
        listens."""
        self.memory: mmap.mmap | None = None
        self._agent = agent.encode()
        self._address = address
        self._key = key
        self._num_bytes = num_bytes
        self._clock = clock
        self._deadline = clock() + CONNECT_WAIT_S
        self._handshake: Handshake | None = None
        self._state = _State.CONNECTING
        self._stream = FramedStream(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._try_connect()

    @property
    def is_open(self) -> bool:
        """Whether the memory is mapped and the owner listens."""
        return self._state is _State.OPEN

    def poll(self) -> None:
        """Take the next step if the owner has answered the last one. If the connection has failed,
        closes it and raises TransferError."""
        if self._state is _State.CONNECTING:
            self._try_connect()
        if self._state is _State.ENDED:
            return
        if self._state is not _State.OPEN and self._clock() >= self._deadline:
            raise self._end(f"its owner has not answered for {CONNECT_WAIT_S:g} s")
        if self._state is not _State.CONNECTING:
            self._read()

    def queue(self, notification: bytes) -> None:
        """Send a notification with one of the next calls of `flush`."""
        self._stream.queue(notification)

    def flush(self) -> int:
        """Send the queued notifications; returns the number of those that this call put into the
        owner's queue. Raises TransferError if the owner is gone."""
        try:
            return self._stream.flush()
        except OSError as error:
            raise self._end(str(error)) from error

    def close(self) -> None:
        """Close the connection and unmap the memory."""
        self._state = _State.ENDED
        self._stream.close()
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def _try_connect(self) -> None:
        try:
            self._stream.socket.connect(self._address)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return
            raise self._end(
                f"its socket does not answer ({error.strerror}): both workers must run on one host "
                "and in one network namespace (containers: share it), else use --transport nixl"
            ) from error
        if who := stranger(self._stream.socket):
            raise self._end(f"its socket belongs to {who}")
        self._state = _State.CHALLENGED

    def _read(self) -> None:
        file = None
        try:
            if self._state is _State.PROVING:
                frames, file = self._stream.receive_file()
            else:
                frames = self._stream.receive()
            for frame in frames:
                self._advance(frame, file)
        except OSError as error:
            raise self._end(str(error)) from error
        finally:
            if file is not None:
                os.close(file)
        if self._stream.is_ended:
            raise self._end("its owner closed the connection")

    def _advance(self, frame: bytes, file: int | None) -> None:
        if self._state is _State.CHALLENGED:
            nonce = secrets.token_bytes(NONCE_BYTES)
            self._handshake = Handshake(self._key, frame, nonce, self._agent)
            self._stream.queue(nonce + self._handshake.peer_proof + self._agent)
            self._stream.flush()
            self._state = _State.PROVING
            return
        if self._state is _State.OPEN:
            raise OSError("its owner sent more than its memory")
        assert self._handshake is not None
        if file is None or not hmac.compare_digest(frame, self._handshake.owner_proof):
            raise OSError("its owner has not the key of the descriptor")
        try:
            self.memory = map_shared(file, self._num_bytes)
        except TransferError as error:
            raise OSError(str(error)) from error
        self._state = _State.OPEN

    def _end(self, reason: str) -> TransferError:
        self.close()
        return TransferError(f"the pool of a peer is out of reach: {reason}")
