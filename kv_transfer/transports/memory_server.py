"""An owner's side: gives the pool's memory to peers that prove the key, and gets notifications.

Owns the listening socket and the peers' connections. On Linux the socket has a random abstract
name, which leaves nothing in the file system; elsewhere it lies in a private folder. Only a peer
that runs as the same user and has the key gets the file, and only its notifications count. Nothing
blocks.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import secrets
import selectors
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kv_transfer.transports.framed_stream import FramedStream
from kv_transfer.transports.interface import Notification
from kv_transfer.transports.memory_handshake import (
    KEY_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Handshake,
    stranger,
)
from protocol.errors import ConfigError

PROOF_WAIT_S = 3.0
_BACKLOG = 128
_MAX_UNPROVED = 64

_log = logging.getLogger(__name__)


@dataclass
class _Caller:
    stream: FramedStream
    challenge: bytes
    deadline: float
    agent: str | None = None  # set once it has proved the key


class MemoryServer:
    """Serves one file. `address` and `key` are for peers' `MemoryClient`."""

    def __init__(
        self, selector: selectors.BaseSelector, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Listen. The selector's data are functions to call when a socket is readable. Raises
        ConfigError."""
        self.key = secrets.token_bytes(KEY_BYTES)
        self.num_refused = 0
        self._selector = selector
        self._clock = clock
        self._folder: str | None = None
        self._file: int | None = None
        self._callers: set[socket.socket] = set()
        self._unproved: dict[socket.socket, _Caller] = {}
        self._arrived: list[Notification] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.address = self._listen()
        except OSError as error:
            self.close()
            raise ConfigError(f"the transport shm cannot listen: {error}") from error
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def _listen(self) -> str:
        name = f"baton-kv-{secrets.token_hex(16)}"
        if sys.platform == "linux":
            address = f"\0{name}"
        else:
            self._folder = tempfile.mkdtemp(prefix="baton-")
            address = str(Path(self._folder) / "kv")
        self._socket.setblocking(False)
        self._socket.bind(address)
        self._socket.listen(_BACKLOG)
        return address

    def serve(self, file: int) -> None:
        """Give this open file to peers from now on; the caller keeps it open until `close`."""
        self._file = file

    def take_notifications(self) -> list[Notification]:
        """The notifications that peers have sent since the last call. Closes connections that fail
        to prove the key."""
        now = self._clock()
        for caller in list(self._unproved.values()):
            if now >= caller.deadline:
                self._refuse(caller, f"no proof within {PROOF_WAIT_S:g} s")
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Close all sockets."""
        for connection in self._callers:
            self._selector.unregister(connection)
            connection.close()
        self._callers.clear()
        self._unproved.clear()
        if self._socket in self._selector.get_map():
            self._selector.unregister(self._socket)
        self._socket.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        """Accept some connections. The others wait for the next turn: strangers who keep
        connecting do not keep the thread here."""
        for _ in range(_MAX_UNPROVED):
            if len(self._unproved) >= _MAX_UNPROVED:
                return
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                return  # peers wait until there are free descriptors
            caller = _Caller(
                FramedStream(connection),
                secrets.token_bytes(NONCE_BYTES),
                self._clock() + PROOF_WAIT_S,
            )
            self._callers.add(connection)
            self._unproved[connection] = caller
            self._selector.register(connection, selectors.EVENT_READ, partial(self._read, caller))
            if who := stranger(connection):
                self._refuse(caller, f"it is {who}")
                continue
            with contextlib.suppress(OSError):  # it went away; the next read reports that
                caller.stream.queue(caller.challenge)
                caller.stream.flush()

    def _read(self, caller: _Caller) -> None:
        try:
            frames = caller.stream.receive()
        except OSError as error:
            self._refuse(caller, str(error))
            return
        for frame in frames:
            if caller.agent is not None:
                self._arrived.append(Notification(caller.agent, frame))
            elif not self._try_admit(caller, frame):
                self._refuse(caller, "its proof is wrong")
                return
        if caller.stream.is_ended:
            self._forget(caller)

    def _try_admit(self, caller: _Caller, frame: bytes) -> bool:
        nonce, rest = frame[:NONCE_BYTES], frame[NONCE_BYTES:]
        proof, agent = rest[:PROOF_BYTES], rest[PROOF_BYTES:]
        handshake = Handshake(self.key, caller.challenge, nonce, agent)
        if self._file is None or not hmac.compare_digest(proof, handshake.peer_proof):
            return False
        caller.agent = agent.decode(errors="replace")
        del self._unproved[caller.stream.socket]
        with contextlib.suppress(OSError):  # it went away; the next read reports that
            caller.stream.send_file(handshake.owner_proof, self._file)
        return True

    def _refuse(self, caller: _Caller, reason: str) -> None:
        self.num_refused += 1
        if self.num_refused.bit_count() == 1:  # 1, 2, 4, 8, ...: strangers cannot fill the log
            _log.warning(
                "a connection to the KV memory is refused, number %d: %s", self.num_refused, reason
            )
        self._forget(caller)

    def _forget(self, caller: _Caller) -> None:
        connection = caller.stream.socket
        self._selector.unregister(connection)
        self._callers.discard(connection)
        self._unproved.pop(connection, None)
        caller.stream.close()
