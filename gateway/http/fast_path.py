"""The generation endpoints, called without the framework's layers.

These endpoints take the bare request and return a response, as their routes say. FastAPI would
serve them the same way. But its middleware stack, route matching and dependency handling, which
these endpoints do not use, take a third of the router's time for a short request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.paths import GENERATION
from gateway.http.variants.head_requests import answer_head

Endpoint = Callable[[Request], Awaitable[Response]]


class Application(FastAPI):
    """A FastAPI application with shortcuts to some of its endpoints."""

    _short_cuts: dict[str, Endpoint]
    _short_cut: ASGIApp | None = None

    def cut_short(
        self, routers: Iterable[APIRouter], surround: Callable[[ASGIApp], ASGIApp]
    ) -> None:
        """Serve the routers' generation routes directly, inside the middleware of `surround`."""
        routes = [
            route for router in routers for route in router.routes if isinstance(route, APIRoute)
        ]
        self._short_cuts = {
            route.path: route.endpoint
            for route in routes
            if route.path in GENERATION and route.methods == {"POST"}
        }
        self._short_cut = surround(self._answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, by a shortcut if its path has one."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            await answer_head(self, scope, receive, send)
        elif (
            self._short_cut is not None
            and scope["type"] == "http"
            and scope["method"] == "POST"
            and scope["path"] in self._short_cuts
        ):
            await self._short_cut(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._short_cuts[scope["path"]](Request(scope, receive, send))
        await response(scope, receive, send)
