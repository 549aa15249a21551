"""The items of a conversation in the form in which they are kept: those of requests and answers.

Parts without effect on prompts (log-probabilities, annotations) are left out. A kept item is read
like one that a client sends. So a conversation continued by the id of a response renders the same
prompt as one that is sent as a whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import msgspec
from pydantic import TypeAdapter

from gateway.api.openai.chat_messages import RefusalPart
from gateway.api.openai_responses.input_items import (
    FunctionOutputItem,
    InputItem,
    Item,
    ItemPart,
    ItemReference,
    MessageItem,
    OtherItem,
    ReasoningItem,
    ReasoningPart,
)
from gateway.api.union_branches import Refused

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def items_of(given: str | Sequence[InputItem]) -> list[Item]:
    """A request's own input as items, without references, refused items, and items with nothing
    to read."""
    if isinstance(given, str):
        return [MessageItem(role="user", content=given)]
    return [each for each in given if not isinstance(each, (OtherItem, Refused, ItemReference))]


def kept_json(history: bytes, own: Iterable[Item]) -> bytes:
    """The JSON list of a conversation's items: the JSON `history`, then the request's own items."""
    before = msgspec.json.decode(history or b"[]", type=list[msgspec.Raw])
    return msgspec.json.encode([*before, *map(_shown, own)])


def continued_json(kept_input: bytes, answer: bytes) -> bytes:
    """The JSON list of a kept response's items: its input, then its output."""
    output = msgspec.json.decode(answer, type=_Answer).output
    for part in (part for item in output for part in item.get("content") or ()):
        part.pop("logprobs", None)
    before = msgspec.json.decode(kept_input, type=list[msgspec.Raw])
    return msgspec.json.encode([*before, *output])


def read_items(kept: bytes) -> list[Item]:
    """The items of a JSON list that was kept."""
    return items_of(_ITEMS.validate_json(kept))


def listed_items(kept: bytes, response_id: str) -> list[dict[str, Any]]:
    """The items as the list of a response's input shows them: each with an id, and content in
    parts."""
    items: list[dict[str, Any]] = msgspec.json.decode(kept)
    digits = response_id.partition("_")[2]
    for place, item in enumerate(items):
        prefix = _PREFIXES.get(item["type"], "item")
        item.setdefault("id", f"{prefix}_{digits}_i{place}")
        if item["type"] != "reasoning":
            item.setdefault("status", "completed")
        content = item.get("content")
        if isinstance(content, str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": content}]
        for part in item.get("content") or ():
            if part["type"] == "output_text":
                part.setdefault("annotations", [])
    return items


def items_by_id(kept: bytes, response_id: str, wanted: Container[str]) -> dict[str, bytes]:
    """The JSON of each wanted item by its id. `kept` are the items of a response, from
    `continued_json`."""
    listed = listed_items(kept, response_id)
    return {item["id"]: msgspec.json.encode(item) for item in listed if item["id"] in wanted}


class _Answer(msgspec.Struct):
    """The fields of an answer that the next prompt repeats."""

    output: list[dict[str, Any]]


def _shown(item: Item) -> dict[str, Any]:
    shown: dict[str, Any] = {"type": item.type}
    if isinstance(item, MessageItem):
        shown |= {"role": item.role, "content": _content(item.content), "phase": item.phase}
    elif isinstance(item, FunctionOutputItem):
        shown |= {"call_id": item.call_id, "output": _content(item.output)}
    elif isinstance(item, ReasoningItem):
        shown |= {"summary": _parts(item.summary) or [], "content": _parts(item.content)}
    else:
        shown |= {name: getattr(item, name) for name in type(item).model_fields}
    shown |= {"id": item.id, "status": item.status}
    return {name: value for name, value in shown.items() if value is not None}


def _content(content: str | list[ItemPart]) -> str | list[dict[str, str]] | None:
    return content if isinstance(content, str) else _parts(content)


def _parts(parts: Sequence[ItemPart | ReasoningPart] | None) -> list[dict[str, str]] | None:
    if parts is None:
        return None
    return [
        {"type": part.type, "refusal" if isinstance(part, RefusalPart) else "text": part.text}
        for part in parts
    ]
