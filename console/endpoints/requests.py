"""Endpoints about single requests: the operators' list and traces, the clients' receipts."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from console.telemetry.perfetto import perfetto_trace
from console.telemetry.request_log import MAX_ROWS, Order, Outcome, RequestLog, RowQuery
from http_kit.caller import CALLER, NOBODY
from http_kit.errors import HttpError
from protocol.errors import RequestError

E = TypeVar("E", bound=StrEnum)
_QUERY = ("order", "outcome", "limit", "prefix")


class _BadQuery(ValueError):
    """A parameter of the query is wrong. The arguments: its name, and what it must be."""


def requests_router(log: RequestLog) -> APIRouter:
    """`GET /requests`, `/requests/{id}/trace`, `/requests/{id}/perfetto` and
    `/v1/requests/{id}/receipt`."""
    router = APIRouter()

    @router.get("/requests")
    async def list_requests(request: Request) -> Response:
        """Rows of running and recent requests."""
        try:
            query = _query_of(request)
        except _BadQuery as error:
            return bad_query(*error.args).response()
        return JSONResponse({"rows": log.rows(query)})

    @router.get("/requests/{request_id}/trace")
    async def get_trace(request_id: str) -> Response:
        """One generation's trace. The id of an HTTP request selects its first choice."""
        trace = await log.trace(request_id)
        return _not_found(request_id).response() if trace is None else JSONResponse(trace)

    @router.get("/requests/{request_id}/perfetto")
    async def get_perfetto(request_id: str) -> Response:
        """The spans of that trace as a file for Perfetto."""
        trace = await log.trace(request_id)
        if trace is None:
            return _not_found(request_id).response()
        return JSONResponse(perfetto_trace(trace))

    @router.get("/v1/requests/{request_id}/receipt")
    async def get_receipt(request_id: str, request: Request) -> Response:
        """What happened to a request of the caller's own: its workers, the reasons, its times."""
        receipt = await log.receipt(request_id, request.scope.get(CALLER, NOBODY))
        return _not_found(request_id).response() if receipt is None else JSONResponse(receipt)

    return router


def _query_of(request: Request) -> RowQuery:
    """The query of `/requests`. Raises _BadQuery."""
    given = request.query_params
    for name in given:
        if name not in _QUERY:
            raise _BadQuery(name, f"no parameter of this name; there are {', '.join(_QUERY)}")
    order = _member("order", given.get("order", Order.RECENT.value), Order)
    outcome = given.get("outcome") or None
    limit = given.get("limit", "50")
    if not (limit.isascii() and limit.isdecimal()) or not 1 <= int(limit) <= MAX_ROWS:
        raise _BadQuery("limit", f"must be a number from 1 to {MAX_ROWS}")
    return RowQuery(
        order=order,
        outcome=None if outcome is None else _member("outcome", outcome, Outcome),
        limit=int(limit),
        prefix=given.get("prefix", ""),
    )


def _member(name: str, value: str, kind: type[E]) -> E:
    try:
        return kind(value)
    except ValueError:
        raise _BadQuery(name, f"must be one of {', '.join(kind)}") from None


def bad_query(name: str, wanted: str) -> HttpError:
    """The answer to a query whose parameter `name` must be as `wanted`."""
    return HttpError(
        status=RequestError.status,
        message=f"{name}: {wanted}",
        kind=RequestError.kind,
        param=name,
        code="invalid_value",
    )


def _not_found(request_id: str) -> HttpError:
    return HttpError(
        status=404,
        message=f"there is no trace of request {request_id}; requests that were refused at "
        "once have none, and only recent ones are kept",
        kind=RequestError.kind,
        param="request_id",
        code="request_not_found",
    )
