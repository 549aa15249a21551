"""The list of served models, and clear errors for endpoints that a text model cannot serve."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.api.choice_planner import check_model
from gateway.api.context import ApiContext
from gateway.api.openai.answers import Model, ModelList
from gateway.http.paths import NOT_SERVED


def models_router(context: ApiContext) -> APIRouter:
    """The endpoints, for an application."""
    router = APIRouter()
    served = context.model

    def model(name: str) -> Model:
        most = served.max_context
        return Model(name, served.created, most, name, _date_of(served.created), most, most)

    async def list_models() -> Response:
        names = served.names
        return _json(ModelList([model(name) for name in names], names[0], names[-1]))

    async def get_model(model_id: str) -> Response:
        if not model_id:
            return await list_models()
        check_model(context, model_id)
        return _json(model(model_id))

    async def refuse(request: Request) -> Response:
        raise HTTPException(404, f"not served: {NOT_SERVED[request.scope['path']]}")

    router.add_api_route("/v1/models", list_models, methods=["GET"])
    router.add_api_route("/v1/models/{model_id:path}", get_model, methods=["GET"])
    for path in NOT_SERVED:
        router.add_api_route(path, refuse, methods=["POST"])
    return router


def _date_of(seconds: int) -> str:
    """A time since the Unix epoch as RFC 3339 has it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _json(content: Model | ModelList) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
