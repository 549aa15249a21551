"""Histories of each API, as the conversations that are made of them."""

from __future__ import annotations

import json
from typing import Any

from gateway.api.anthropic import conversation as anthropic
from gateway.api.anthropic.request import MessagesRequest
from gateway.api.body_reader import fields_of
from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai_responses import conversation as responses
from gateway.api.openai_responses.request import ResponsesRequest
from gateway.chat.conversation import Message
from protocol.errors import InvalidRequest

HI = {"role": "user", "content": "Hi"}


def read(schema: Any, convert: Any, **fields: Any) -> tuple[tuple[Message, ...], list[str]]:
    """The messages of a body, and the names of what is left out of it."""
    body = json.dumps({"model": "m", **fields}).encode()
    request, ignored = fields_of(schema, body, False)
    return convert(request).messages, list(ignored)


def refusal(read_one: Any, *entry: Any) -> InvalidRequest | None:
    """Why a history is refused, if it is."""
    try:
        read_one(*entry)
    except InvalidRequest as error:
        return error
    return None


def of_chat(*messages: Any) -> tuple[tuple[Message, ...], list[str]]:
    return read(ChatRequest, lambda request: request.conversation, messages=[HI, *messages])


def of_blocks(role: str, *blocks: Any) -> tuple[tuple[Message, ...], list[str]]:
    messages = [HI, {"role": role, "content": list(blocks)}, HI]
    return read(MessagesRequest, anthropic.conversation_of, messages=messages, max_tokens=5)


def of_items(*items: Any) -> tuple[tuple[Message, ...], list[str]]:
    return read(ResponsesRequest, responses.conversation_of, input=[HI, *items, HI])
