"""Answers `HEAD` wherever `GET` is answered: with the same head, and no body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class _HeadSent(BaseException):
    """Ends the application once the head is sent. Not an error, so that nothing answers it."""


async def answer_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a HEAD request as `app` answers GET. The application ends with its head, because the
    body may be a stream without end."""

    async def send_head(message: Message) -> None:
        await send(message)
        if message["type"] == "http.response.start":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            raise _HeadSent

    try:
        await app({**scope, "method": "GET"}, receive, send_head)
    except _HeadSent:
        return
