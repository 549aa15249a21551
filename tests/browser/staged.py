"""A router's dashboard over staged data: fleets that a test could not start quickly enough, or at
all.

The page, its stream and its feed are real; only the sources of the summaries are staged.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry

from console.dashboard.feed import Feed, Source
from console.dashboard.pages import pages_router
from console.dashboard.stream_endpoint import stream_router
from console.dashboard.summary import shown_summary
from gateway.http.connection import BoundedProtocols, ConnectionLimits
from gateway.http.server import Doorway, HttpServer, listen, url_of
from process.clock import wall_us

PREFIX = "/some/prefix"


class StagedRouter:
    """Serves `sources` in a thread of its own. `url` is below a path prefix, as behind a proxy."""

    def __init__(self, sources: Mapping[str, Source], period_s: float) -> None:
        self._sources = sources
        self._period_s = period_s
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._stop = lambda: None
        self.url = ""
        self.feed: Feed | None = None

    def __enter__(self) -> StagedRouter:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        self.feed = feed = Feed(self._sources, self._period_s)
        app = FastAPI(openapi_url=None, redirect_slashes=False)
        for router in (stream_router(feed), _documents(self._sources), pages_router()):
            app.include_router(router, prefix=PREFIX)
        limits = ConnectionLimits(32_000, 32_000, 60.0, 30.0)
        listener = listen("127.0.0.1", 0)
        self.url = f"{url_of(listener)}{PREFIX}"
        doorway = Doorway(BoundedProtocols(limits, CollectorRegistry()))
        server = HttpServer(app, doorway, 1.0, self._started.set, lambda: None)
        await asyncio.gather(server.serve_until(stop, listener), feed.run(stop))
        listener.close()


def _documents(sources: Mapping[str, Source]) -> APIRouter:
    router = APIRouter()

    @router.get("/doctor")
    async def doctor() -> Any:
        return sources["doctor"]() if "doctor" in sources else {"findings": [], "passed": []}

    @router.get("/requests")
    async def requests() -> Any:
        return sources["requests"]() if "requests" in sources else {"rows": []}

    @router.get("/requests/{request_id}/trace")
    async def trace(request_id: str) -> Any:
        return sources["trace"]()

    return router


def _shown(report: Mapping[str, Any]) -> dict[str, Any]:
    return shown_summary(report, report["cluster"], report["offers"], wall_us())


@contextmanager
def staged(period_s: float = 1.0, **sources: Any) -> Iterator[StagedRouter]:
    """Serve objects, or functions that return them, by the name of their event. `fleet` is the
    object of `GET /fleet`, with the cluster's name and the views on offer."""
    functions = {
        name: source if callable(source) else lambda source=source: source
        for name, source in sources.items()
    }
    report = functions["fleet"]
    functions["fleet"] = lambda: _shown(report())
    with StagedRouter(functions, period_s) as made:
        yield made
