"""A client's connection to an HTTP protocol that runs without a socket."""

from __future__ import annotations

import asyncio


class RecordedConnection(asyncio.Transport):
    """Records what the server writes, until it closes the connection."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Record data, unless the connection is closed."""
        if not self.is_closed:
            self.written += bytes(data)

    def can_write_eof(self) -> bool:
        """A connection ends in both directions at once."""
        return False

    def is_closing(self) -> bool:
        """Whether the server has closed the connection."""
        return self.is_closed

    def close(self) -> None:
        """The server closes the connection."""
        self.is_closed = True

    abort = close

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The client reads everything at once."""

    def get_write_buffer_size(self) -> int:
        """The client has read everything."""
        return 0

    def pause_reading(self) -> None:
        """The caller feeds the protocol itself."""

    def resume_reading(self) -> None:
        """The caller feeds the protocol itself."""
