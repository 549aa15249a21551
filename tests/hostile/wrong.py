"""What the OpenAPI document says about bodies: wrong values for every field, and the fields that
the attacks of `tests.hostile.conversations` reach.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from gateway.api.openapi import openapi_document
from gateway.api.strict_model import MAX_DIGITS
from tests.hostile.sizes import Body, BodyAttack, Sizes, base_of

Schema = dict[str, Any]
_PREFIX = "#/components/schemas/"


def _numbers(sizes: Sizes) -> Any:
    return [1] * (sizes.values - 100)


def _objects(sizes: Sizes) -> Any:
    return [{"a": 1}] * (sizes.parts // 2 - 100)


def _names(sizes: Sizes) -> Any:
    return {f"k{i}": None for i in range(sizes.parts - 100)}


def _digits(sizes: Sizes) -> bytes:
    number = b"9" * MAX_DIGITS
    return b"[" + b",".join([number] * (sizes.body_bytes // (MAX_DIGITS + 1) - 1)) + b"]"


WRONG: dict[str, Callable[[Sizes], Any]] = {
    "numbers": _numbers,
    "objects": _objects,
    "names": _names,
}


def wrong_attacks() -> list[BodyAttack]:
    """Every wrong value in every field of every endpoint's body, and in unknown fields."""
    attacks = []
    for path, schema in body_schemas().items():
        for name in schema["properties"]:
            for kind, make in WRONG.items():
                attacks.append(BodyAttack(f"{name}: {kind}", path, _with(path, name, make)))
        attacks.append(BodyAttack("unknown fields", path, _unknown(path)))
        attacks.append(BodyAttack("long numbers", path, _long_numbers(path)))
        attacks.append(BodyAttack("only brackets", path, lambda sizes: b"[" * sizes.body_bytes))
        attacks.append(BodyAttack("only blanks", path, lambda sizes: b" " * sizes.body_bytes))
        attacks.append(BodyAttack("only quotes", path, lambda sizes: b'"' * sizes.body_bytes))
        attacks.append(
            BodyAttack("backslashes", path, lambda sizes: b'"' + b"\\" * sizes.body_bytes)
        )
        attacks.append(BodyAttack("escapes", path, _escapes))
    return attacks


def _escapes(sizes: Sizes) -> bytes:
    escaped = rb"\u00e9" * min(sizes.escapes, sizes.body_bytes // 6 - 1)
    return b'"' + escaped.ljust(sizes.body_bytes - 2, b"x") + b'"'


def _with(path: str, name: str, make: Callable[[Sizes], Any]) -> Callable[[Sizes], Body]:
    return lambda sizes: base_of(path, sizes) | {name: make(sizes)}


def _unknown(path: str) -> Callable[[Sizes], Body]:
    return lambda sizes: base_of(path, sizes) | {f"k{i}": 1 for i in range(sizes.parts - 200)}


def _long_numbers(path: str) -> Callable[[Sizes], bytes]:
    def body(sizes: Sizes) -> bytes:
        head = json.dumps(base_of(path, sizes)).encode()
        return head[:-1] + b',"unknown":' + _digits(sizes) + b"}"

    return body


# -- which fields there are, and which an attack reaches ----------------------------------------


@cache
def _document() -> Schema:
    return openapi_document()


def body_schemas() -> dict[str, Schema]:
    """The schema of every endpoint that takes a body, by path."""
    document = _document()
    return {
        path: _resolved(document, operation["requestBody"]["content"]["application/json"]["schema"])
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if "requestBody" in operation
    }


def all_fields(path: str) -> set[str]:
    """Every field that accepts some value, as `Schema.field`, of an endpoint's body."""
    document, found = _document(), set[str]()
    waiting, seen = [_ref_of(document, path)], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for field, schema in document["components"]["schemas"][name].get("properties", {}).items():
            if not _is_refused(schema):
                found.add(f"{name}.{field}")
                waiting += list(_refs_in(schema))
    return found


def reached_fields(path: str, body: Any) -> set[str]:
    """The fields, as `Schema.field`, that a body sets."""
    document, found = _document(), set[str]()

    def walk(schema: Schema, value: Any) -> None:
        for option in _options(document, schema):
            if isinstance(value, list) and "items" in option:
                for each in value[:16]:
                    walk(option["items"], each)
            if isinstance(value, dict) and "properties" in option and _fits(option, value):
                for field, inner in option["properties"].items():
                    if value.get(field) is not None:
                        found.add(f"{option['title']}.{field}")
                        walk(inner, value[field])

    walk({"$ref": _PREFIX + _ref_of(document, path)}, body)
    return found


def _ref_of(document: Schema, path: str) -> str:
    content = document["paths"][path]["post"]["requestBody"]["content"]
    name: str = content["application/json"]["schema"]["$ref"]
    return name.removeprefix(_PREFIX)


def _resolved(document: Schema, schema: Schema) -> Schema:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    found: Schema = document["components"]["schemas"][reference.removeprefix(_PREFIX)]
    return found


def _options(document: Schema, schema: Schema) -> Iterator[Schema]:
    """The schema and all its alternatives."""
    schema = _resolved(document, schema)
    yield schema
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _options(document, each)


def _refs_in(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].removeprefix(_PREFIX)
        for each in schema.values():
            yield from _refs_in(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _refs_in(each)


def _is_refused(schema: Schema) -> bool:
    """Whether a field accepts only null and neutral values: its `enum` has null, or its only
    type is null."""
    return (
        None in schema.get("enum", ())
        or schema.get("type") == "null"
        or ("Not supported" in schema.get("description", ""))
    )


def _fits(option: Schema, value: Body) -> bool:
    """Whether an object's type, if the schema fixes it, is this one."""
    kind = option["properties"].get("type", {})
    fixed = [kind["const"]] if "const" in kind else kind.get("enum")
    return fixed is None or value.get("type", fixed[0]) in fixed
