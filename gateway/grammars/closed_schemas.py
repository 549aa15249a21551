"""Objects without properties that their schema allows only by saying nothing of them.

By the standard an object may have any property that its schema does not mention. That is not what
the author of a function means, nor of a strict schema: OpenAI requires `additionalProperties` to be
false there.
"""

from __future__ import annotations

from typing import Any

from gateway.grammars.inner_schemas import inner_schemas

_LISTING = frozenset(
    (
        "type", "properties", "required", "title", "description", "$schema", "$id", "$comment",
        "$defs", "definitions", "default", "examples", "deprecated", "nullable",
    )
)  # fmt: skip
"""Keywords that say nothing of properties that are neither listed nor required."""
_APPLIED = frozenset(("anyOf", "oneOf", "$ref"))
_OF_OBJECTS = frozenset(
    (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "dependentRequired",
    )
)  # fmt: skip
_INTERSECTING = frozenset(
    ("allOf", "if", "not", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")
)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with no other properties than those that it lists or requires, if it says nothing
    of others and lists any or none (`properties`). Its inner schemas stay as they are."""
    listed, required = schema.get("properties"), schema.get("required", [])
    says_more = any(key not in _LISTING and not key.startswith("x-") for key in schema)
    if says_more or not isinstance(listed, dict) or not isinstance(required, list):
        return schema
    unlisted = {name: True for name in required if isinstance(name, str) and name not in listed}
    return schema | {"properties": listed | unlisted, "additionalProperties": False}


def has_intersections(schema: Any) -> bool:
    """Whether one value may have to follow several object schemas of a document. None of them can
    be closed, since it would forbid what the others list. An `allOf` of one schema is none."""
    return any(map(_intersects, inner_schemas(schema)))


def _intersects(schema: dict[str, Any]) -> bool:
    keys, joined = set(schema), schema.get("allOf")
    if isinstance(joined, list) and len(joined) == 1:
        keys = keys - {"allOf"} | {"$ref"}
    applied = keys & _APPLIED
    return bool(keys & _INTERSECTING) or len(applied) > 1 or bool(applied and keys & _OF_OBJECTS)
