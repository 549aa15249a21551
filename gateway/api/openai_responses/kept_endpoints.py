"""Endpoints for kept responses. Each key sees only the responses that it made."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.api.context import ApiContext
from gateway.api.openai_responses import answer as api
from gateway.api.openai_responses.background import BackgroundRuns
from gateway.api.openai_responses.kept_items import listed_items
from gateway.api.openai_responses.memory import document_of, is_response_id
from gateway.http.request_scope import record_of
from gateway.text.tokenizer import Tokenizer
from http_kit.caller import owner_of
from process.store.response_records import CANCELLED, ResponseName, ResponseRecord
from protocol.errors import InvalidRequest, ResponseNotFound

_NO_MEMORY = "This router keeps no responses; it does with --responses-store."
_MOST_ITEMS, _USUAL_ITEMS = 100, 20


def kept_router(context: ApiContext, runs: BackgroundRuns | None) -> APIRouter:
    """The endpoints, for an application; without `runs` nothing is ever found."""
    router = APIRouter()
    endpoints = _Endpoints(context.tokenizer, runs)
    path = "/v1/responses/{response_id}"
    router.add_api_route(path, endpoints.retrieve, methods=["GET"])
    router.add_api_route(path, endpoints.delete, methods=["DELETE"])
    router.add_api_route(f"{path}/cancel", endpoints.cancel, methods=["POST"])
    router.add_api_route(f"{path}/input_items", endpoints.list_input, methods=["GET"])
    return router


class _Endpoints:
    def __init__(self, tokenizer: Tokenizer, runs: BackgroundRuns | None) -> None:
        self._tokenizer = tokenizer
        self._runs = runs

    async def retrieve(self, response_id: str, request: Request) -> Response:
        """A response as it is now."""
        name, runs = self._known(response_id, request)
        if request.query_params.get("stream", "false").lower() != "false":
            raise InvalidRequest("'stream': a kept response is returned as a whole", "stream")
        record = _found(name, await runs.memory.find(name))
        return await self._shown(request, record.answer, lambda: document_of(record))

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
