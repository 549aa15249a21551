"""Server-sent events as OpenAI's clients read them.

The producer writes events as they come, without waiting; events written in one turn of the event
loop leave together. The response begins with the first event, so that an earlier error can still
get its own HTTP status. If the first event takes so long that proxies might time out, the response
begins with a comment. Comments keep the connection alive in every long silence. When the response
has ended, for whatever reason, its producer has ended too, with every generation behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from http_kit.disconnect import ClientConnection, ClientGone, connection_of, while_connected
from http_kit.errors import HttpError

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n"
"""No empty line, which only streams without ids may have: after an event with an id, OpenAI's
Python client would take an empty line as the end of another event without data, and fail."""
KEEP_ALIVE_ALONE = KEEP_ALIVE + b"\n"
"""For streams without ids: some clients skip all that follows a comment up to an empty line."""


def event(document: bytes) -> bytes:
    """One JSON document (without line breaks) as an event."""
    return b"data: " + document + b"\n\n"


def named_event(name: str, document: bytes) -> bytes:
    """One JSON document (without line breaks) as a named event."""
    return b"event: " + name.encode() + b"\ndata: " + document + b"\n\n"


def tagged_events(events: Iterable[msgspec.Struct]) -> bytes:
    """Structs as events in JSON; each has its struct's tag as its name."""
    return b"".join(
        named_event(str(each.__struct_config__.tag), msgspec.json.encode(each)) for each in events
    )


def as_it_is(events: bytes) -> bytes:
    """The events unchanged, for formats whose documents are already events."""
    return events


@dataclass(frozen=True, slots=True)
class StreamStyle:
    """How an API writes its streams: a document, the end, the keep-alive, and an error."""

    frame: Callable[[bytes], bytes] = event
    done: bytes = _DONE
    keep_alive: bytes = KEEP_ALIVE
    error: Callable[[HttpError], bytes] = lambda error: event(error.body())


OPENAI_STYLE = StreamStyle()


class EventSink(Protocol):
    """Where the events of a generation go: to a client, or to a log."""

    style: StreamStyle

    @property
    def is_full(self) -> bool:
        """Whether the producer should wait for room."""
        ...

    def write(self, events: bytes) -> None:
        """Take whole events, or the next part of a long one. Never waits."""
        ...

    async def wait_room(self) -> None:
        """Wait until there is room for more."""
        ...


class EventWriter:
    """The events of one response. `begun` resolves with the first event.

    Until `close`, `keepalive_s` without an event makes the writer send a comment. The cost is one
    timer per stream and interval, and a counter increment per event.
    """

    def __init__(self, keepalive_s: float, style: StreamStyle = OPENAI_STYLE) -> None:
        self.style = style
        self._loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = self._loop.create_future()
        self._keepalive_s = keepalive_s
        self._count = self._counted = 0
        self._timer = self._loop.call_later(keepalive_s, self._on_interval)
        self._pending: list[bytes] = []
        self.outlet: ClientConnection | None = None
        """The client's connection once the response has begun."""

    def write(self, events: bytes) -> None:
        """Queue whole events, or the next part of a long one, for sending. Never waits."""
        self._count += 1
        pending = self._pending
        if not pending:
            if self.outlet is not None:
                self._loop.call_soon(self.flush)
            elif not self.begun.done():
                self.begun.set_result(None)
        pending.append(events)

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly."""
        return self.outlet is not None and self.outlet.is_paused

    async def wait_room(self) -> None:
        """Wait until the client has caught up or left."""
        if self.outlet is not None:
            await self.outlet.wait_writable()

    def open(self, outlet: ClientConnection) -> None:
        """Send events from now on: the response has begun."""
        self.outlet = outlet
        self.flush()

    def flush(self) -> None:
        """Send the queued events."""
        pending, self._pending = self._pending, []
        if pending and self.outlet is not None:
            self.outlet.write_chunk(pending[0] if len(pending) == 1 else b"".join(pending))

    def close(self) -> None:
        """Stop sending comments."""
        self._timer.cancel()

    def _on_interval(self) -> None:
        if self._count == self._counted and not self.is_full:
            self.write(self.style.keep_alive)
        self._counted = self._count
        self._timer = self._loop.call_later(self._keepalive_s, self._on_interval)


class EventStream(Response):
    """Sends the events that `produce` writes, then `[DONE]` or the end marker of `style`.

    An error before the first event or comment is raised. A later one becomes the last event, as
    `describe` words it, and no `[DONE]` follows. `ended` is called once at the end of a response
    that has begun, with None or the error (`ClientGone` if the client went away).
    """

    def __init__(
        self,
        produce: Callable[[EventWriter], Coroutine[Any, Any, None]],
        describe: Callable[[Exception], HttpError],
        ended: Callable[[Exception | None], None],
        keepalive_s: float,
        style: StreamStyle = OPENAI_STYLE,
    ) -> None:
        super().__init__(headers=_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._produce = produce
        self._describe = describe
        self._ended = ended
        self._keepalive_s = keepalive_s
        self._style = style
        self._has_begun = self._has_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole response; stop if the client goes away."""
        try:
            await while_connected(connection_of(scope), self._send_all(scope, send))
        except ClientGone as error:
            if not self._has_begun:
                raise
            if not self._has_ended:
                self._ended(error)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        style = self._style
        writer = EventWriter(self._keepalive_s, style)
        producing = asyncio.ensure_future(self._produce(writer))
        try:
            await asyncio.wait((producing, writer.begun), return_when=asyncio.FIRST_COMPLETED)
            if not writer.begun.done():
                producing.result()
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            self._has_begun = True
            writer.open(connection_of(scope))
            outcome = await self._outcome(producing)
            writer.close()
            last = style.done if outcome is None else style.error(self._describe(outcome))
            if last:
                writer.write(last)
            writer.flush()
            self._has_ended = True
            self._ended(outcome)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            writer.close()
            producing.cancel()
            await asyncio.gather(producing, return_exceptions=True)

    async def _outcome(self, producing: asyncio.Future[None]) -> Exception | None:
        try:
            await producing
        except Exception as error:  # noqa: BLE001 - the top: fails this one request
            return error
        return None
