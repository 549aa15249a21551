"""Summaries for all readers of the page, built once per second and only while someone reads.

A source is a function that returns a JSON object. Readers get the changes since the summary they
last took; a slow reader skips summaries, so nothing queues. Each set of changes is encoded once for
all readers with the same last summary. Runs on the event loop; knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from console.dashboard.summary_changes import Versions

PERIOD_S = 1.0

Source = Callable[[], Mapping[str, Any]]


class Feed:
    """The latest summary of each source, and its readers. `feed_id` tells feeds of other router
    processes apart; `period_s` is the time between two summaries."""

    def __init__(self, sources: Mapping[str, Source], period_s: float = PERIOD_S) -> None:
        self.feed_id = secrets.token_hex(4)
        self.number = 0
        self.num_readers = 0
        self._sources = dict(sources)
        self._versions = {name: Versions() for name in sources}
        self._period_s = period_s
        self._frames: dict[tuple[str, int], bytes] = {}
        self._wanted = asyncio.Event()
        self._next: asyncio.Future[None] | None = None
        self._is_closed = False

    @property
    def names(self) -> frozenset[str]:
        """The names of the sources."""
        return frozenset(self._sources)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count one reader; for the first one, build a summary at once."""
        if not self.num_readers:
            self._build()
        self.num_readers += 1
        self._wanted.set()
        try:
            yield
        finally:
            self.num_readers -= 1
            if not self.num_readers:
                self._wanted.clear()

    def frame(self, name: str, since: int) -> bytes:
        """The changes of a source after summary `since` (0: everything), as one server-sent
        event."""
        key = (name, since)
        found = self._frames.get(key)
        if found is None:
            data = msgspec.json.encode(self._versions[name].since(since))
            found = self._frames[key] = (
                f"id: {self.feed_id}-{self.number}\nevent: {name}\ndata: ".encode() + data + b"\n\n"
            )
        return found

    def known_number(self, last_event_id: str) -> int:
        """The number of the summary that a reader took last, from the id of its last event; 0 if
        that event is not from this feed."""
        feed_id, _, number = last_event_id.partition("-")
        if feed_id != self.feed_id or not number.isdecimal() or len(number) > 12:
            return 0
        return int(number) if int(number) <= self.number else 0

    async def wait_after(self, number: int) -> bool:
        """Wait for a summary after this one. False once the feed is closed."""
        while not self._is_closed and self.number <= number:
            if self._next is None:
                self._next = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._next)
        return not self._is_closed

    async def run(self, stop: asyncio.Event) -> None:
        """Build summaries while there are readers; end all readers when `stop` is set."""
        building = asyncio.create_task(self._build_periodically())
        try:
            await stop.wait()
        finally:
            building.cancel()
            await asyncio.wait([building])
            self._is_closed = True
            self._announce()
        if not building.cancelled() and (error := building.exception()) is not None:
            raise error

    async def _build_periodically(self) -> None:
        while True:
            await self._wanted.wait()
            await asyncio.sleep(self._period_s)
            if self.num_readers:
                self._build()

    def _build(self) -> None:
        self.number += 1
        for name, source in self._sources.items():
            self._versions[name].update(self.number, source())
        self._frames.clear()
        self._announce()

    def _announce(self) -> None:
        waiting, self._next = self._next, None
        if waiting is not None:
            waiting.set_result(None)
