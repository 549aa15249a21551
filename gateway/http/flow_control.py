"""Flow control of one connection: pausing reads, and holding up the code that writes."""

from __future__ import annotations

import asyncio


class Flow:
    """Pauses and resumes reading, and holds up writers while the write buffer is full."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = False
        self.write_paused = False
        self._may_write = asyncio.Event()
        self._may_write.set()

    async def drain(self) -> None:
        """Wait until writing is not paused."""
        await self._may_write.wait()

    def pause_reading(self) -> None:
        """Pause reading."""
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Hold up writers."""
        self.write_paused = True
        self._may_write.clear()

    def resume_writing(self) -> None:
        """Release writers."""
        self.write_paused = False
        self._may_write.set()
