"""Server-sent events as OpenAI's clients read them.

The response takes a stream whose first event was already awaited, so that whatever goes wrong
before it still has an HTTP status of its own. It owns the stream: however the response ends,
the stream is closed, and with it every generation behind it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.disconnect import ClientGone, while_connected

Events = AsyncGenerator[bytes, None]
"""JSON documents, one an event."""

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"

logger = logging.getLogger(__name__)


def event(document: bytes) -> bytes:
    """One JSON document (without line breaks) as an event."""
    return b"data: " + document + b"\n\n"


class EventStream(Response):
    """Sends `first`, then the rest of `events`, then `[DONE]`.

    An error in mid-stream becomes a last event, as `describe` words it, and no `[DONE]` follows.
    `ended` is called once with None, or the error (`ClientGone` where the client went away).
    """

    def __init__(
        self,
        first: bytes,
        events: Events,
        describe: Callable[[Exception], bytes],
        ended: Callable[[Exception | None], None],
    ) -> None:
        super().__init__(headers=_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._describe = describe
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends everything, watching for a client that goes away."""
        outcome: Exception | None = None
        async with aclosing(self._events):
            try:
                await while_connected(receive, self._send_all(send))
            except ClientGone as error:
                outcome = error
            except Exception as error:  # noqa: BLE001 - the top: fails this one request
                outcome = error
                await self._send(send, event(self._describe(error)), more=False)
        self._ended(outcome)

    async def _send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await self._send(send, event(self._first))
        async for document in self._events:
            await self._send(send, event(document))
        await self._send(send, _DONE, more=False)

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})
