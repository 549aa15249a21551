"""Numbers of JSON schemas that llguidance cannot read, and counts that no answer reaches.

Knows no request: errors say what is wrong with a number, the caller says in which field.
"""

from __future__ import annotations

import sys
from typing import Any

MAX_COUNT = 2**31 - 1
"""The largest count of characters, items or properties: more than an answer of any length has."""
_LEAST = ("minLength", "minItems", "minProperties")
_MOST = ("maxLength", "maxItems", "maxProperties")
_LARGEST = int(sys.float_info.max)


def without_idle_limits(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema itself without upper limits that every answer keeps; its subschemas stay."""
    return {
        key: value
        for key, value in schema.items()
        if not (key in _MOST and _is_number(value) and value > MAX_COUNT)
    }


def wrong_count(schema: dict[str, Any]) -> str | None:
    """The first of the schema's own counts that is no integer, negative or beyond MAX_COUNT.
    Values that are no numbers are left to llguidance, which says what they are."""
    for key in (*_LEAST, *_MOST):
        value = schema.get(key)
        if _is_number(value) and not (isinstance(value, int) and 0 <= value <= MAX_COUNT):
            return key
    return None


def place_of_huge_number(schema: Any) -> str | None:
    """The JSON pointer of an integer that no float can hold, wherever it stands; llguidance reads
    no such number."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        path, part = waiting.pop()
        if isinstance(part, dict):
            waiting.extend((f"{path}/{key}", value) for key, value in part.items())
        elif isinstance(part, list):
            waiting.extend((f"{path}/{place}", value) for place, value in enumerate(part))
        elif isinstance(part, int) and abs(part) > _LARGEST:
            return path
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
