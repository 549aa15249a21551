"""Server-sent events as OpenAI's clients read them.

The response begins with the first event, so that what goes wrong before it still has an HTTP
status of its own; unless that event takes so long that proxies might lose patience. Then, and in
every long silence, comments keep the connection alive. The response owns the stream: however it
ends, the stream is closed, and with it every generation behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Self

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.disconnect import ClientGone, while_connected

Events = AsyncGenerator[bytes, None]
"""JSON documents, one an event."""

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"

logger = logging.getLogger(__name__)


def event(document: bytes) -> bytes:
    """One JSON document (without line breaks) as an event."""
    return b"data: " + document + b"\n\n"


class EventStream(Response):
    """Sends `events`, then `[DONE]`.

    An error before the first event is raised, if no comment was sent yet. In mid-stream it becomes
    a last event, as `describe` words it, and no `[DONE]` follows; `ended` is then called once with
    the error (`ClientGone` where the client went away), or with None. After `keepalive_s` without
    an event a comment is sent.
    """

    def __init__(
        self,
        events: Events,
        describe: Callable[[Exception], bytes],
        ended: Callable[[Exception | None], None],
        keepalive_s: float,
    ) -> None:
        super().__init__(headers=_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._describe = describe
        self._ended = ended
        self._keepalive_s = keepalive_s
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends everything, watching for a client that goes away."""
        outcome: Exception | None = None
        async with aclosing(self._events):
            try:
                await while_connected(receive, self._send_all(send))
            except ClientGone as error:
                outcome = error
            except Exception as error:
                if not self._has_begun:
                    raise
                outcome = error
                await self._send(send, event(self._describe(error)), more=False)
        self._ended(outcome)

    async def _send_all(self, send: Send) -> None:
        with _Pulse(lambda: self._send(send, _KEEP_ALIVE), self._keepalive_s) as pulse:
            async for document in self._events:
                pulse.count += 1
                await self._send(send, event(document))
        await self._send(send, _DONE, more=False)

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            start = {"type": "http.response.start", "status": self.status_code}
            await send({**start, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": more})


class _Pulse:
    """Calls `beat` in every interval in which `count` did not grow, while it is open.

    Costs one timer a stream and interval, and nothing per event but the counting.
    """

    def __init__(self, beat: Callable[[], Coroutine[Any, Any, None]], interval_s: float) -> None:
        self.count = 0
        self._beat = beat
        self._interval_s = interval_s
        self._seen = 0
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._beating is not None:
            self._beating.cancel()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_s, self._on_interval)

    def _on_interval(self) -> None:
        is_idle = self._beating is None or self._beating.done()
        if self.count == self._seen and is_idle:  # a client that does not read has one waiting
            self._beating = asyncio.ensure_future(self._beat())
        self._seen = self.count
        self._wait()
