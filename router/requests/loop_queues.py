"""Queues for tasks of one event loop: items for one reader, and turns for tasks with long work."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Mailbox(Generic[_T]):
    """A FIFO of items, read by one task at a time. Everything runs on one event loop.

    `asyncio.Queue` allows many readers and costs three times as much.
    """

    __slots__ = ("_items", "_reader")

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _T) -> None:
        """Append an item. Never waits."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> _T:
        """Wait for an item and take the first one."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._items.popleft()


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
