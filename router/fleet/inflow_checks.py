"""Checks regularly, on the event loop, how many bytes a worker has sent over a session that were
not read. The session ends if there are more than an honest worker can have under way, so that an
endless message does not fill the router's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from process.sockets.inflow import CHECK_S, Inflow
from protocol.errors import ProtocolError
from router.fleet.frame_socket import FrameSocket

MAX_UNREAD_BYTES = 128 * 1024 * 1024
"""Twice the longest message."""


class InflowChecks:
    """The inflows of a session's sockets; `fail` gets the error that ends the session."""

    def __init__(self, fail: Callable[[Exception], object]) -> None:
        self._fail = fail
        self._inflows: list[tuple[FrameSocket, Inflow]] = []
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(CHECK_S, self._check)

    def add(self, socket: FrameSocket) -> Inflow:
        """The inflow of a socket. The caller passes the events of the socket's monitor to it."""
        inflow = Inflow(MAX_UNREAD_BYTES)
        self._inflows.append((socket, inflow))
        return inflow

    def close(self) -> None:
        """Stop checking."""
        self._timer.cancel()

    def _check(self) -> None:
        for socket, inflow in self._inflows:
            inflow.took_in_all(socket.bytes_taken)
            if inflow.check():
                self._fail(ProtocolError("it sends more than is read, or a message without an end"))
        self._timer = self._loop.call_later(CHECK_S, self._check)
