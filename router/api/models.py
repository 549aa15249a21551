"""The list of served models, and clear errors for endpoints that a text model cannot serve."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from router.api.context import ApiContext
from router.api.openai.answers import Model, ModelList
from router.api.plan import check_model
from router.http.paths import NOT_GENERATION


def models_router(context: ApiContext) -> APIRouter:
    """The endpoints, for an application."""
    router = APIRouter()
    served = context.model

    def model(name: str) -> Model:
        return Model(name, served.created, served.max_context)

    async def list_models() -> Response:
        return _json(ModelList([model(name) for name in served.names]))

    async def get_model(model_id: str) -> Response:
        check_model(context, model_id)
        return _json(model(model_id))

    async def refuse(request: Request) -> Response:
        raise HTTPException(404, f"{served.name!r} only generates text, so this is not served")

    router.add_api_route("/v1/models", list_models, methods=["GET"])
    router.add_api_route("/v1/models/{model_id:path}", get_model, methods=["GET"])
    for path in NOT_GENERATION:
        router.add_api_route(path, refuse, methods=["POST"])
    return router


def _json(content: Model | ModelList) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
