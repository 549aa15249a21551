"""Endpoints for orchestrators and monitors: liveness, readiness, version and metrics.

They are served before the fleet is ready, too. Alive means that this process answers; ready means
that a request would find a worker. `/ping` is the name that SageMaker's and vLLM's probes use for
`/health`.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.responses import Response

from process.version import baton_version
from protocol.errors import Overloaded
from router.requests.interface import ReadinessCheck


class ServiceStatus(Struct, frozen=True):
    """Answer of the probes."""

    status: str = "ok"


class ServiceVersion(Struct, frozen=True):
    """Answer of `/version`."""

    version: str


def probe_router(registry: CollectorRegistry, ready: ReadinessCheck) -> APIRouter:
    """The endpoints, for an application."""
    router = APIRouter()

    async def is_ready() -> Response:
        reason = ready()
        if reason is not None:
            raise Overloaded(reason)
        return _json(ServiceStatus())

    async def is_alive() -> Response:
        return _json(ServiceStatus())

    async def get_version() -> Response:
        return _json(ServiceVersion(baton_version()))

    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    for path in ("/health", "/ready", "/ping"):
        router.add_api_route(path, is_ready, methods=["GET"])
    router.add_api_route("/ping", is_ready, methods=["POST"])
    router.add_api_route("/live", is_alive, methods=["GET"])
    router.add_api_route("/version", get_version, methods=["GET"])
    router.add_api_route("/metrics", metrics, methods=["GET"])
    return router


def _json(content: Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
