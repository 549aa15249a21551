"""Replaces references to items of kept responses by the items.

An item's id contains the id of its response. In a conversation continued by references, the newest
response holds all earlier items, so the search starts with the newest.
"""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request

from gateway.api.context import ApiContext
from gateway.api.openai_responses.background import BackgroundRuns
from gateway.api.openai_responses.input_items import InputItem, ItemReference
from gateway.api.openai_responses.kept_items import read_items
from gateway.api.openai_responses.memory import ResponseMemory, is_response_id, response_of_item
from gateway.api.openai_responses.request import InputTokensRequest
from gateway.api.strict_model import check_bounds
from gateway.http.request_scope import record_of
from http_kit.caller import owner_of
from process.store.response_records import ResponseName
from protocol.errors import InvalidRequest, ItemNotFound

_Fields = TypeVar("_Fields", bound=InputTokensRequest)
NO_MEMORY = "this router keeps no responses; it does with --responses-store"
MAX_RESPONSES = 64
"""The most responses that are searched for the items of one request."""


async def with_items(
    request: Request, context: ApiContext, runs: BackgroundRuns | None, fields: _Fields
) -> _Fields:
    """The request with items in place of references. A reference to an item of the previous
    response is dropped, and so is a repeated reference: the conversation already has the item.
    Raises InvalidRequest, ItemNotFound and StoreTrouble."""
    given = fields.input
    if isinstance(given, str):
        return fields
    wanted = dict.fromkeys(each.id for each in given if isinstance(each, ItemReference))
    if not wanted:
        return fields
    if runs is None:
        place = next(at for at, each in enumerate(given) if isinstance(each, ItemReference))
        raise InvalidRequest(
            f"'input[{place}]': an 'item_reference' needs a response that is kept, and {NO_MEMORY}."
            " Send the items themselves; clients do so with `store: false`",
            f"input[{place}]",
        )
    owner, memory = owner_of(request.scope), runs.memory
    previous = fields.previous_response_id
    known = dict[str, bytes]()
    if previous is not None and is_response_id(previous):
        known = await memory.items(ResponseName(owner, previous), wanted)
    found = await _find(memory, owner, [each for each in wanted if each not in known])
    record = record_of(request.scope)
    kept = b"[" + b",".join(found.values()) + b"]"
    record.take_body(len(kept))

    def read() -> list[InputItem]:
        record.hold(check_bounds(kept))
        items = dict(zip(found, read_items(kept), strict=True))
        whole: list[InputItem] = []
        for each in given:
            if not isinstance(each, ItemReference):
                whole.append(each)
            elif each.id in items:
                whole.append(items.pop(each.id))
        return whole

    return fields.model_copy(update={"input": await context.convert(request.scope, read)})


async def _find(memory: ResponseMemory, owner: str, wanted: list[str]) -> dict[str, bytes]:
    """The JSON of the wanted items by their ids. Raises InvalidRequest, ItemNotFound and
    StoreTrouble."""
    missing, num_searched = dict.fromkeys(wanted), 0
    found: dict[str, bytes] = {}
    for item_id in reversed(wanted):
        response_id = response_of_item(item_id)
        if item_id in found or response_id is None:
            continue
        if num_searched == MAX_RESPONSES:
            raise InvalidRequest(
                f"'input' refers to items of more than {MAX_RESPONSES} responses", "input"
            )
        num_searched += 1
        more = await memory.items(ResponseName(owner, response_id), missing)
        if item_id not in more:
            raise ItemNotFound(item_id)
        found |= more
        for each in more:
            del missing[each]
    for item_id in missing:
        raise ItemNotFound(item_id)
    return found
