"""A JSON answer in one piece, written without ASGI messages if the connection allows."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.disconnect import connection_of
from router.http.request_scope import record_of

_STATUS = 200
_HEADERS = ((b"content-type", b"application/json"),)


class WholeAnswer(Response):
    """A document with the headers that name its request, all in one write."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the document; use ASGI's `send` only if the connection cannot take it directly."""
        record = record_of(scope)
        headers = (*_HEADERS, *record.names())
        if connection_of(scope).try_answer(scope, headers, bytes(self.body)):
            record.status = _STATUS
        else:
            await super().__call__(scope, receive, send)
