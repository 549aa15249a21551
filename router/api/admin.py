"""Endpoints for operators: the fleet as this router sees it, and where a request's time went."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from protocol.errors import RequestError
from router.fleet.fleet import Fleet
from router.http.errors import HttpError
from router.requests.trace import TraceStore


def admin_router(fleet: Fleet, traces: TraceStore) -> APIRouter:
    """`GET /fleet` and `GET /requests/{id}/trace`."""
    router = APIRouter()

    @router.get("/fleet")
    async def get_fleet() -> list[dict[str, Any]]:
        """Every member of the fleet with its load."""
        return fleet.as_json()

    @router.get("/requests/{request_id}/trace")
    async def get_trace(request_id: str) -> Response:
        """One generation's trace. The id of an HTTP request selects its first choice."""
        trace = traces.get(request_id)
        if trace is None:
            return _not_found(request_id).response()
        return JSONResponse(trace.as_json())

    return router


def _not_found(request_id: str) -> HttpError:
    return HttpError(
        status=404,
        message=f"there is no trace of request {request_id}; only recent ones are kept",
        kind=RequestError.kind,
        param="request_id",
        code="request_not_found",
    )
