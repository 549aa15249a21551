"""The events of responses in the background whose clients asked for a stream.

The router that runs a response collects its events until the store has them. Any number of clients
follow them, from the first event or from a later one, and leave whenever they like. The number of
an event is its place in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Scope

from gateway.api.context import ApiContext
from gateway.api.replies.reply import event_stream
from gateway.http.request_scope import RequestRecord, record_of
from http_kit.sse import KEEP_ALIVE_ALONE, EventStream, EventWriter, StreamStyle, as_it_is

_STYLE = StreamStyle(frame=as_it_is, done=b"", keep_alive=KEEP_ALIVE_ALONE)
_EVENT_END = b"\n\n"
_EVENT_BYTES = 64
"""Memory of an event besides its text."""
MOST_AT_ONCE = 256


class EventLog:
    """The events of one response; an `EventSink`. The request's record counts their memory until
    the run and all followers have left."""

    is_full = False

    def __init__(self, record: RequestRecord) -> None:
        self.style = _STYLE
        self._record = record
        self._events: list[bytes] = []
        self._begun = bytearray()
        """The beginning of an event whose other parts follow."""
        self._has_ended = False
        self._num_users = 1  # the run, and its followers
        self._waiting: list[asyncio.Future[None]] = []

    def write(self, events: bytes) -> None:
        """Add whole events, or a part of one. Raises Overloaded if the router has no room."""
        self._record.hold(len(events))
        self._begun += events
        if self._begun.endswith(_EVENT_END):
            added = split_events(bytes(self._begun))
            self._begun.clear()
            self._record.hold(_EVENT_BYTES * len(added))
            self._events += added
            self._wake()

    async def wait_room(self) -> None:
        """There is always room."""

    def end(self, last: bytes = b"") -> None:
        """No event follows, or only the `last` ones."""
        self._events += split_events(last)
        self._has_ended = True
        self._wake()

    def leave_run(self) -> None:
        """The run is over: give back its place behind the gate, and the memory if nobody reads."""
        self._record.leave_gate()
        self._leave()

    def whole(self) -> bytes:
        """All events so far."""
        return b"".join(self._events)

    async def follow(self, place: int) -> AsyncGenerator[bytes, None]:
        """The events from this place on, as they come, several at a time. Close the iterator."""
        self._num_users += 1
        try:
            while place < len(self._events) or not self._has_ended:
                events = self._events[place : place + MOST_AT_ONCE]
                place += len(events)
                if events:
                    yield b"".join(events)
                    continue
                more = asyncio.get_running_loop().create_future()
                self._waiting.append(more)
                await more
        finally:
            self._leave()

    def _leave(self) -> None:
        self._num_users -= 1
        if self._num_users == 0:
            self._record.release()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


def split_events(events: bytes) -> list[bytes]:
    """Whole events one by one, each with the empty line behind it."""
    return [each + _EVENT_END for each in events.split(_EVENT_END)[:-1]]


def followed(context: ApiContext, scope: Scope, events: AsyncGenerator[bytes, None]) -> EventStream:
    """The events as an answer, as fast as the client reads. The response goes on without it."""

    async def produce(writer: EventWriter) -> None:
        async with aclosing(events):
            async for each in events:
                writer.write(each)
                await asyncio.sleep(0)  # the answer begins in the next turn of the loop
                await writer.wait_room()

    return event_stream(context, record_of(scope), produce, _STYLE)
