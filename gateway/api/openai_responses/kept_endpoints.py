"""Endpoints for kept responses. Each key sees only the responses that it made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.api.context import ApiContext
from gateway.api.openai_responses import answer as api
from gateway.api.openai_responses.background import BackgroundRuns
from gateway.api.openai_responses.event_log import MOST_AT_ONCE, followed, split_events
from gateway.api.openai_responses.kept_items import listed_items
from gateway.api.openai_responses.memory import ResponseMemory, document_of, is_response_id
from gateway.http.request_scope import record_of
from http_kit.caller import owner_of
from http_kit.sse import KEEP_ALIVE_ALONE, named_event
from process.store.response_records import CANCELLED, FAILED, ResponseName, ResponseRecord
from protocol.errors import InvalidRequest, ResponseNotFound

_NO_MEMORY = "This router keeps no responses; it does with --responses-store."
_MOST_ITEMS, _USUAL_ITEMS = 100, 20
_MOST_DIGITS = 9
_LOOK_S = 0.5
"""The pause between looks at a response that another router runs."""


def kept_router(context: ApiContext, runs: BackgroundRuns | None) -> APIRouter:
    """The endpoints, for an application; without `runs` nothing is ever found."""
    router = APIRouter()
    endpoints = _Endpoints(context, runs)
    path = "/v1/responses/{response_id}"
    router.add_api_route(path, endpoints.retrieve, methods=["GET"])
    router.add_api_route(path, endpoints.delete, methods=["DELETE"])
    router.add_api_route(f"{path}/cancel", endpoints.cancel, methods=["POST"])
    router.add_api_route(f"{path}/input_items", endpoints.list_input, methods=["GET"])
    return router


class _Endpoints:
    def __init__(self, context: ApiContext, runs: BackgroundRuns | None) -> None:
        self._context = context
        self._tokenizer = context.tokenizer
        self._runs = runs

    async def retrieve(self, response_id: str, request: Request) -> Response:
        """A response as it is now."""
        name, runs = self._known(response_id, request)
        if request.query_params.get("stream", "false").lower() != "false":
            return await self._followed(name, runs, request)
        record = _found(name, await runs.memory.find(name))
        return await self._shown(request, record.answer, lambda: document_of(record))

    async def _followed(
        self, name: ResponseName, runs: BackgroundRuns, request: Request
    ) -> Response:
        """The events of a streamed response behind `starting_after`. Raises InvalidRequest."""
        start, log = _first_event(request), runs.log_of(name)
        if log is not None:
            return followed(self._context, request.scope, log.follow(start))
        if _found(name, await runs.memory.find(name)).events is None:
            raise InvalidRequest(
                "'stream': only a response that was created with 'background' and 'stream' can be "
                "retrieved as a stream",
                "stream",
            )
        return followed(
            self._context, request.scope, _kept_events(name, runs.memory, request, start)
        )

    async def delete(self, response_id: str, request: Request) -> Response:
        """Delete a response. A response that still runs in the background is stopped."""
        name, runs = self._known(response_id, request)
        if not await runs.memory.delete(name):
            raise ResponseNotFound(response_id)
        runs.stop(name)
        return await self._shown(
            request, b"", lambda: msgspec.json.encode(api.DeletedResponse(name.id))
        )

    async def cancel(self, response_id: str, request: Request) -> Response:
        """Cancel a response in the background. A response that has ended stays as it is."""
        name, runs = self._known(response_id, request)
        record = _found(name, await runs.memory.cancel(name))
        if not record.is_background:
            raise InvalidRequest(
                "Cannot cancel a synchronous response: it was created without 'background'."
            )
        if record.status == CANCELLED:
            runs.stop(name)
        return await self._shown(request, record.answer, lambda: document_of(record))

    async def list_input(self, response_id: str, request: Request) -> Response:
        """The items before a response's output, those of previous responses included."""
        name, runs = self._known(response_id, request)
        page = _Page(request)
        record = _found(name, await runs.memory.find(name))
        return await self._shown(
            request, record.input, lambda: msgspec.json.encode(page.of(record, response_id))
        )

    def _known(self, response_id: str, request: Request) -> tuple[ResponseName, BackgroundRuns]:
        if self._runs is None:
            raise ResponseNotFound(response_id, _NO_MEMORY)
        if not is_response_id(response_id):
            raise ResponseNotFound(response_id)
        return ResponseName(owner_of(request.scope), response_id), self._runs

    async def _shown(self, request: Request, data: bytes, make: Callable[[], bytes]) -> Response:
        """The JSON that `make` returns for the data. Raises Overloaded if there is no memory for
        it."""
        record_of(request.scope).hold(2 * len(data))
        document = await self._tokenizer.off_loop(make, len(data))
        return Response(document, media_type="application/json")


def _first_event(request: Request) -> int:
    """The number of the first event that a client wants. Raises InvalidRequest."""
    after = request.query_params.get("starting_after")
    if after is None:
        return 0
    if not (after.isascii() and after.isdecimal()):
        raise InvalidRequest("'starting_after' must be the number of an event", "starting_after")
    return int(after[:_MOST_DIGITS]) + 1


async def _kept_events(
    name: ResponseName, memory: ResponseMemory, request: Request, start: int
) -> AsyncGenerator[bytes, None]:
    """The events of a response from number `start` on, once it has ended at the router that runs
    it. If they were lost with that router, the only event is the failure. Raises InvalidRequest if
    they were too many to be kept."""
    if await memory.records.is_running(name):
        yield KEEP_ALIVE_ALONE  # the answer begins at once
    while await memory.records.is_running(name):
        await asyncio.sleep(_LOOK_S)
    record = _found(name, await memory.find(name))
    whole = await memory.events_of(name, record)
    record_of(request.scope).hold(2 * len(whole))
    if not whole and record.status == FAILED:
        lost = {"sequence_number": start, "response": msgspec.Raw(document_of(record))}
        document = msgspec.json.encode({"type": "response.failed", **lost})
        yield named_event("response.failed", document)
    elif not whole and record.status != CANCELLED:
        raise InvalidRequest(
            "'stream': the response has more events than are kept; retrieve it as a whole", "stream"
        )
    events = split_events(whole)
    for place in range(start, len(events), MOST_AT_ONCE):
        yield b"".join(events[place : place + MOST_AT_ONCE])


def _found(name: ResponseName, record: ResponseRecord | None) -> ResponseRecord:
    if record is None:
        raise ResponseNotFound(name.id)
    return record


class _Page:
    """The part of a list that a query asks for. Raises InvalidRequest."""

    def __init__(self, request: Request) -> None:
        query = request.query_params
        limit = query.get("limit", str(_USUAL_ITEMS))
        if not (limit.isascii() and limit.isdecimal()) or not 1 <= int(limit[:9]) <= _MOST_ITEMS:
            raise InvalidRequest(f"'limit' must be a number from 1 to {_MOST_ITEMS}", "limit")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("'order' must be 'asc' or 'desc'", "order")
        self._limit, self._is_descending = int(limit), order == "desc"
        self._after = query.get("after")

    def of(self, record: ResponseRecord, response_id: str) -> api.InputItems:
        """The page. Raises InvalidRequest if `after` names an unknown item."""
        items = listed_items(record.input, response_id)
        if self._is_descending:
            items.reverse()
        ids = [str(item["id"]) for item in items]
        start = 0
        if self._after is not None:
            if self._after not in ids:
                raise InvalidRequest("'after' is not the id of an item of this list", "after")
            start = ids.index(self._after) + 1
        page, shown = items[start : start + self._limit], ids[start : start + self._limit]
        return api.InputItems(
            data=page,
            first_id=shown[0] if shown else None,
            last_id=shown[-1] if shown else None,
            has_more=start + self._limit < len(items),
        )
