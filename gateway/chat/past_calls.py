"""Arguments and ids of calls in a conversation's history, as templates take them.

A call of an answer is accepted in the next request even if it was cut off or is not JSON: it is
mended by the rules by which answers are read. Missing brackets and quotes are added at its end, and
an argument without a value is left out.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from gateway.chat.json_value import JsonValue
from gateway.text.json_text import decode_json

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
UNREADABLE = "arguments"
"""The name of the argument that holds a text which is not an object."""


def arguments_object(text: str, param: str) -> dict[str, Any]:
    """The arguments as an object. Raises InvalidRequest, naming `param`, only if they nest too
    deeply."""
    try:
        value = decode_json(text, param) if text.strip() else {}
    except ValueError:
        value = _mended(text, param)
    if value is None:
        return {}
    return value if isinstance(value, dict) else {UNREADABLE: text}


def arguments_text(text: str, param: str) -> str:
    """The arguments as JSON text: unchanged if they are the JSON of an object."""
    arguments = arguments_object(text, param)
    try:
        is_same = json.loads(text) == arguments
    except ValueError:
        is_same = False
    return text if is_same else json.dumps(arguments, ensure_ascii=False)


def with_literals(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with texts as Python literals, in quotes."""
    return {key: repr(each) if isinstance(each, str) else each for key, each in arguments.items()}


def short_call_id(call_id: str) -> str:
    """An id of nine letters and digits: `call_id` itself if it has this form."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


def _mended(text: str, param: str) -> Any:
    value = JsonValue()
    text = text.strip()
    end = value.scan(text, 0)
    if value.broken or text[end:].strip("]} \t\r\n") or not value.complete_anyhow():
        return text
    try:
        return decode_json(value.take_json(), param)
    except ValueError:  # a number of thousands of digits
        return text
