"""The schemas inside a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_NO_SCHEMAS = frozenset(("const", "enum", "default", "examples"))


def inner_schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in a document that may be a schema, itself included, in no particular order.
    Values (`enum`, `default`) are none, and neither are tables of schemas by name (`properties`),
    whose keys are no keywords."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        if not isinstance(part, dict):
            continue
        yield part
        for key, value in part.items():
            if key in _BY_NAME and isinstance(value, dict):
                waiting.extend(value.values())
            elif key not in _NO_SCHEMAS:
                waiting.append(value)
