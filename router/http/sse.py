"""Server-sent events as OpenAI's clients read them.

Whoever makes the events writes them when they are there, without waiting; what is written in one
turn of the event loop leaves together. The response begins with the first event, so that what goes
wrong before it still has an HTTP status of its own; unless that event takes so long that proxies
might lose patience. Then, and in every long silence, comments keep the connection alive. However
the response ends, the making of events has ended, too, and with it every generation behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.disconnect import ClientConnection, ClientGone, connection_of, while_connected
from router.http.errors import HttpError

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n"
"""No empty line: after an event with an id that ends another event, without data, for OpenAI's
python client, which then fails."""


def event(document: bytes) -> bytes:
    """One JSON document (without line breaks) as an event."""
    return b"data: " + document + b"\n\n"


def named_event(name: str, document: bytes) -> bytes:
    """One JSON document (without line breaks) as an event that has a name."""
    return b"event: " + name.encode() + b"\ndata: " + document + b"\n\n"


def as_it_is(events: bytes) -> bytes:
    """For formats whose documents are events already."""
    return events


@dataclass(frozen=True, slots=True)
class StreamStyle:
    """How an API writes its streams: each document, the end, a sign of life, and an error."""

    frame: Callable[[bytes], bytes] = event
    done: bytes = _DONE
    keep_alive: bytes = _KEEP_ALIVE
    error: Callable[[HttpError], bytes] = lambda error: event(error.body())


OPENAI_STYLE = StreamStyle()


class EventWriter:
    """The events of one response. `begun` is done with the first of them.

    After `keepalive_s` without an event a comment is written, until `close`: that costs a timer a
    stream and interval, and nothing per event but the counting.
    """

    def __init__(self, keepalive_s: float, style: StreamStyle = OPENAI_STYLE) -> None:
        self.style = style
        self._loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = self._loop.create_future()
        self._keepalive_s = keepalive_s
        self._count = self._counted = 0
        self._timer = self._loop.call_later(keepalive_s, self._on_interval)
        self._pending: list[bytes] = []
        self._outlet: ClientConnection | None = None

    def write(self, events: bytes) -> None:
        """Send one or several whole events, soon. Never waits."""
        self._count += 1
        pending = self._pending
        if not pending:
            if self._outlet is not None:
                self._loop.call_soon(self.flush)
            elif not self.begun.done():
                self.begun.set_result(None)
        pending.append(events)

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly."""
        return self._outlet is not None and self._outlet.is_paused

    async def wait_room(self) -> None:
        """Returns when the client has caught up, or is gone."""
        if self._outlet is not None:
            await self._outlet.wait_writable()

    def open(self, outlet: ClientConnection) -> None:
        """The response has begun: from now on events leave."""
        self._outlet = outlet
        self.flush()

    def flush(self) -> None:
        """Let go of what was written."""
        pending, self._pending = self._pending, []
        if pending and self._outlet is not None:
            self._outlet.write_chunk(pending[0] if len(pending) == 1 else b"".join(pending))

    def close(self) -> None:
        """No comments from now on."""
        self._timer.cancel()

    def _on_interval(self) -> None:
        if self._count == self._counted and not self.is_full:
            self.write(self.style.keep_alive)
        self._counted = self._count
        self._timer = self._loop.call_later(self._keepalive_s, self._on_interval)


class EventStream(Response):
    """Sends what `produce` writes, then `[DONE]`, or what `style` has in its place.

    An error before the first event is raised, if no comment was sent yet. Later it becomes a last
    event, as `describe` words it, and no `[DONE]` follows. `ended` is called once at the end of a
    response that has begun, with None, or the error (`ClientGone` where the client went away).
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
        """Sends everything, watching for a client that goes away."""
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
