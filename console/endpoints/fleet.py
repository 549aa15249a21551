"""Endpoints for operators: the fleet as this router sees it, what is wrong, what caches save, and
the last events of each process."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from console.endpoints.requests import bad_query, requests_router
from console.telemetry.caches.cache_report import CacheReport
from console.telemetry.examination.diagnosis import Diagnosis
from console.telemetry.fleet_report import FleetReport
from console.telemetry.flight import ROUTER, FlightReport
from console.telemetry.request_log import RequestLog
from http_kit.errors import HttpError
from protocol.errors import RequestError
from protocol.messages import FlightRequest

_TIMES = ("since_us", "until_us")
_FLIGHT_QUERY = ("process", "request_id", *_TIMES)
_TIME = re.compile("[0-9]{1,18}")


def admin_router(report: FleetReport, log: RequestLog) -> APIRouter:
    """`GET /fleet`, and the routes about single requests."""
    router = APIRouter()

    @router.get("/fleet")
    async def get_fleet() -> Response:
        """Every member of the fleet with its load, and what the fleet does as a whole."""
        return JSONResponse(report.as_json())

    router.include_router(requests_router(log))
    return router


def doctor_router(diagnosis: Diagnosis, cache: CacheReport) -> APIRouter:
    """`GET /doctor`, `/doctor/observation` and `/cache`."""
    router = APIRouter()

    @router.get("/doctor")
    async def get_doctor() -> Response:
        """What is wrong with the fleet, by which evidence, and what to change."""
        return JSONResponse(diagnosis.as_json())

    @router.get("/doctor/observation")
    async def get_observation() -> Response:
        """The input of the last examination; `baton doctor` can examine it again."""
        seen = diagnosis.observation_json()
        return _not_examined().response() if seen is None else JSONResponse(seen)

    @router.get("/cache")
    async def get_cache() -> Response:
        """How much the prefix caches save, and what other sizes would save."""
        return JSONResponse(cache.as_json())

    return router


def flight_router(flight: FlightReport) -> APIRouter:
    """`GET /flight`."""
    router = APIRouter()

    @router.get("/flight")
    async def get_flight(request: Request) -> Response:
        """The last events of a process: of this router, or of a worker."""
        given = request.query_params
        for name, value in given.items():
            if name not in _FLIGHT_QUERY:
                known = ", ".join(_FLIGHT_QUERY)
                return bad_query(name, f"no parameter of this name; there are {known}").response()
            if name in _TIMES and not _TIME.fullmatch(value):
                return bad_query(name, "must be microseconds of the Unix epoch").response()
        since_us, until_us = (int(given.get(name, "0")) for name in _TIMES)
        wanted = FlightRequest(
            nonce=0,
            request_id=given.get("request_id", ""),
            since_us=since_us,
            until_us=until_us,
        )
        process = given.get("process", ROUTER)
        found = await flight.as_json(process, wanted)
        return _no_process(process, flight).response() if found is None else JSONResponse(found)

    return router


def _no_process(name: str, flight: FlightReport) -> HttpError:
    return HttpError(
        status=404,
        message=f"there is no process {name}; use one of {', '.join(flight.names())}",
        kind=RequestError.kind,
        param="process",
        code="process_not_found",
    )


def _not_examined() -> HttpError:
    return HttpError(
        status=404,
        message="this router has just started and has not examined the fleet yet",
        kind=RequestError.kind,
        code="not_examined",
    )
