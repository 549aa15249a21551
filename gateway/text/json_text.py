"""Checks of JSON inside a string, which the checks of a request's body do not see.

A body may neither nest deeper than `MAX_DEPTH` nor contain half of a surrogate pair, which UTF-8
encoders refuse.
"""

from __future__ import annotations

import json
import re
from typing import Any

from protocol.errors import InvalidRequest

MAX_DEPTH = 200
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def decode_json(text: str, param: str) -> Any:
    """The value of a JSON text, with halves of surrogate pairs replaced by U+FFFD.

    Raises ValueError for a text that is not JSON, and InvalidRequest, naming `param`, for one that
    nests too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise too_deep(param) from error
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value, param)
    return _well_formed_value(value) if _SURROGATE_ESCAPE.search(text) else value


def well_formed(text: str) -> str:
    """The text with halves of surrogate pairs, which JSON can escape, replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def too_deep(param: str) -> InvalidRequest:
    """The error for JSON that nests too deeply."""
    return InvalidRequest(f"'{param}' holds JSON that nests deeper than {MAX_DEPTH}", param)


def _check_depth(value: Any, param: str) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH + 1:  # the innermost level holds no lists or objects
            raise too_deep(param)
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        level = inner


def _well_formed_value(value: Any) -> Any:
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, list):
        return [_well_formed_value(each) for each in value]
    if isinstance(value, dict):
        return {well_formed(key): _well_formed_value(each) for key, each in value.items()}
    return value
