"""Answers to requests with `functions`, the older form of `tools`: one call, as `function_call`."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from gateway.api.openai.answers import ChatDelta, ChatMessageBody


def legacy_body(body: ChatMessageBody) -> ChatMessageBody:
    """The message with its call in the older form."""
    if not body.tool_calls:
        return body
    call = body.tool_calls[0].function
    return msgspec.structs.replace(body, tool_calls=UNSET, function_call=call)


def legacy_delta(delta: ChatDelta) -> ChatDelta:
    """The piece of a message with its piece of a call in the older form."""
    if not delta.tool_calls:
        return delta
    call = delta.tool_calls[0].function
    return msgspec.structs.replace(delta, tool_calls=UNSET, function_call=call)


def legacy_finish(finish: str | None) -> str | None:
    """Why a message ended, in the older words."""
    return "function_call" if finish == "tool_calls" else finish
