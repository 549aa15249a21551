"""What is not generation: `/v1/models`, `/health` and `/metrics`."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.responses import Response

from protocol.errors import Overloaded
from router.api.context import ApiContext
from router.api.plan import check_model
from router.api.responses import Model, ModelList


def service_router(context: ApiContext, registry: CollectorRegistry) -> APIRouter:
    """The endpoints, for an application."""
    router = APIRouter()
    served = context.model
    model = Model(served.name, served.created, served.max_context)

    async def list_models() -> Response:
        return _json(ModelList([model]))

    async def get_model(model_id: str) -> Response:
        check_model(context, model_id)
        return _json(model)

    async def health() -> Response:
        reason = context.ready()
        if reason is not None:
            raise Overloaded(reason)
        return _json({"status": "ok"})

    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    router.add_api_route("/v1/models", list_models, methods=["GET"])
    router.add_api_route("/v1/models/{model_id:path}", get_model, methods=["GET"])
    router.add_api_route("/health", health, methods=["GET"])
    router.add_api_route("/metrics", metrics, methods=["GET"])
    return router


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
