"""A queue for one reader; `asyncio.Queue` allows many readers and costs three times as much."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Mailbox(Generic[_T]):
    """A FIFO of items, read by one task at a time. Everything runs on one event loop."""

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
