"""`GET /dashboard/stream?view=...`: the feed's summaries as server-sent events.

The page reads it with `fetch`, because `EventSource` cannot send a key. Every view gets the event
`fleet`. A view with the name of a source gets that source's event, too. `Last-Event-ID` continues
after the summary that the reader took last.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from console.dashboard.feed import Feed
from http_kit.errors import HttpError, describe
from http_kit.sse import EventStream, EventWriter, StreamStyle, as_it_is
from protocol.errors import InvalidRequest

VIEWS = ("fleet", "requests", "doctor", "cache", "controls")
KEEPALIVE_S = 15.0
_STYLE = StreamStyle(frame=as_it_is, done=b"")


def stream_router(feed: Feed) -> APIRouter:
    """The route, for an application."""
    router = APIRouter()

    @router.get("/dashboard/stream")
    async def stream(request: Request) -> Response:
        view = request.query_params.get("view", "fleet")
        if view not in VIEWS:
            names = ", ".join(VIEWS)
            return _described(InvalidRequest(f"'view' is one of {names}", "view")).response()
        names_of_view = [name for name in dict.fromkeys(("fleet", view)) if name in feed.names]
        since = feed.known_number(request.headers.get("last-event-id", ""))

        async def produce(writer: EventWriter) -> None:
            await _send_summaries(feed, names_of_view, since, writer)

        return EventStream(produce, _described, lambda error: None, KEEPALIVE_S, _STYLE)

    return router


async def _send_summaries(feed: Feed, names: list[str], since: int, writer: EventWriter) -> None:
    """Write the latest summary whenever there is a newer one and the reader has room."""
    with feed.reading():
        while True:
            for name in names:
                writer.write(feed.frame(name, since))
            since = feed.number
            if not await feed.wait_after(since):
                return
            await writer.wait_room()


def _described(error: Exception) -> HttpError:
    return describe(error, request_id="of the dashboard")
