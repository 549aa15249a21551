"""JSON answers: in one piece, written without ASGI messages if the connection allows, or, if they
are long, in pieces as fast as the client reads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.request_scope import record_of
from http_kit.disconnect import connection_of, while_connected

_STATUS = 200
_HEADERS = ((b"content-type", b"application/json"),)
MAX_PIECE_BYTES = 64 * 1024


class WholeAnswer(Response):
    """A document with the headers that name its request, all in one write."""

    media_type = "application/json"
    status_code = _STATUS
    background = None

    def __init__(self, document: bytes) -> None:
        """The base class's headers are made only if they are needed."""
        self.body = document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the document; use ASGI's `send` only if the connection cannot take it directly."""
        record = record_of(scope)
        headers = (*_HEADERS, *record.names())
        if connection_of(scope).try_answer(scope, headers, bytes(self.body)):
            record.status = _STATUS
        else:
            self.init_headers()
            await super().__call__(scope, receive, send)


class LongAnswer(Response):
    """A document made piece by piece, each once the client has read enough of the earlier ones.
    `next_piece` returns b"" at the end; an error of its first call becomes an answer with its own
    status. `ended` is called once, however the answer ends."""

    media_type = "application/json"

    def __init__(
        self, next_piece: Callable[[], Awaitable[bytes]], ended: Callable[[], None]
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._next_piece = next_piece
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole document. Raises ClientGone if the client leaves."""
        try:
            await while_connected(connection_of(scope), self._send_all(send))
        finally:
            self._ended()

    async def _send_all(self, send: Send) -> None:
        piece = await self._next_piece()
        start = {"type": "http.response.start", "status": _STATUS, "headers": self.raw_headers}
        await send(start)
        while piece:
            for at in range(0, len(piece), MAX_PIECE_BYTES):  # `send` waits for a slow client
                part = piece[at : at + MAX_PIECE_BYTES]
                await send({"type": "http.response.body", "body": part, "more_body": True})
            piece = await self._next_piece()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
