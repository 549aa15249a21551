"""Removes null fields that a schema does not know: an unknown null means the same as no field.

This runs only for bodies that were refused, so bodies without unknown nulls cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError


def without_unknown_nulls(body: bytes, error: ValidationError) -> bytes | None:
    """The body without the unknown nulls that `error` lists; None if it lists none."""
    places = [
        each["loc"]
        for each in error.errors(include_url=False)
        if each["type"] == "extra_forbidden" and each["input"] is None
    ]
    if not places:
        return None
    try:
        document = json.loads(body)
    except ValueError:  # a number has too many digits: the caller reports `error` instead
        return None
    for place in places:
        _drop(document, place)
    return json.dumps(document).encode()


def _drop(value: Any, place: Sequence[int | str]) -> bool:
    """Removes the null at a location that pydantic reports; returns whether it was found.

    A part of the location may name a branch of a union instead of a key or an index.
    """
    part, rest = place[0], place[1:]
    if not rest:
        is_there = isinstance(value, dict) and part in value and value[part] is None
        if is_there:
            del value[part]
        return is_there
    if isinstance(value, dict) and part in value and _drop(value[part], rest):
        return True
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return _drop(value[part], rest)
    return _drop(value, rest)
