"""Fields that a schema does not know and that are null: they mean as little as if they were absent.

Looked for only where a body was refused, so that those without any cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError


def without_unknown_nulls(body: bytes, error: ValidationError) -> bytes | None:
    """The body without the nulls for which `error` refused it; None if it has none of these."""
    places = [
        each["loc"]
        for each in error.errors(include_url=False)
        if each["type"] == "extra_forbidden" and each["input"] is None
    ]
    if not places:
        return None
    try:
        document = json.loads(body)
    except ValueError:  # a number of too many digits: what else was wrong is the answer
        return None
    for place in places:
        _drop(document, place)
    return json.dumps(document).encode()


def _drop(value: Any, place: Sequence[int | str]) -> bool:
    """Removes the null at a place that pydantic names; returns whether it was found.

    A part of the place may name a branch of a union instead of a key or an index.
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
