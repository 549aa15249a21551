"""Turns for tasks of one event loop that have long work."""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets tasks pass in the order of their arrival, one in each turn of the event loop.

    Tasks that wait for the same event wake up in the same turn. If each then computed for some
    milliseconds, other tasks would wait until the last one is done.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    async def passed(self) -> None:
        """Wait for this task's turn. A cancelled task uses no turn."""
        if not self._is_taken:
            self._is_taken = True
            asyncio.get_running_loop().call_soon(self._next)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False
