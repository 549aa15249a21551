"""The HTTP application before the fleet serves: the model's name and context are still unknown.

Both come from the first decode worker's registration. Until then, operators see the fleet and the
metrics, and every other request gets a 503 that says to retry.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.docs_page import documents_router
from gateway.api.probes import probe_router
from gateway.http.anthropic_errors import error_response
from gateway.http.fast_path import Application
from http_kit.errors import describe
from protocol.errors import Overloaded
from router.requests.interface import ReadinessCheck

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


class LateApp:
    """An ASGI application that forwards to another one, which `serve` replaces."""

    def __init__(self, waiting: ASGIApp) -> None:
        self._app = waiting

    def serve(self, app: ASGIApp) -> None:
        """Forward to `app` from the next request on."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def waiting_app(
    registry: CollectorRegistry,
    ready: ReadinessCheck,
    routers: Iterable[APIRouter],
    root_path: str = "",
) -> Application:
    """An application that serves `routers` and the probes, and answers everything else with a 503
    that gives the reason. Clients see it under `root_path`."""
    app = Application(title="Baton", openapi_url=None, redirect_slashes=False)

    def reason() -> str:
        return ready() or "the service is starting"

    async def not_ready(request: Request, error: Exception) -> Response:
        return error_response(describe(error, request_id=""), request.scope["path"], None)

    async def later(path: str) -> Response:
        raise Overloaded(reason())

    app.add_exception_handler(Overloaded, not_ready)
    for router in (probe_router(registry, reason), documents_router(root_path), *routers):
        app.include_router(router)
    app.add_api_route("/{path:path}", later, methods=_METHODS)
    return app
