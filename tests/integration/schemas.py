"""JSON schemas of growing difficulty, made from a seed: 20 kinds, each at 10 sizes.

Strings and arrays are bounded, so that any conforming text ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
SIZES = 10
_WORDS = ["red", "green", "blue", "é", "a b", 'quo"te', "back\\slash", "", "/", "日本"]


def make_schemas(seed: int = 6) -> list[Schema]:
    """200 of them, the simple ones first."""
    rng = random.Random(seed)
    return [kind(rng, size) for size in range(1, SIZES + 1) for kind in KINDS]


def _object(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }


def _text(size: int) -> Schema:
    return {"type": "string", "maxLength": 3 * size}


def _scalar(rng: random.Random, size: int) -> Schema:
    low = rng.randrange(-50, 50)
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            _text(size),
            {"type": "integer", "minimum": low, "maximum": low + size},
            {"enum": rng.sample(_WORDS, min(size, len(_WORDS)))},
            {"const": rng.choice([1, "x", None, [1, {"a": 2}]])},
        ]
    )


def _numbers(rng: random.Random, size: int) -> Schema:
    low = rng.randrange(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + size}


def _reals(rng: random.Random, size: int) -> Schema:
    low = rng.randrange(-5, 5)
    bounds = {"minimum": low, "exclusiveMaximum": low + size}
    return _object(
        {"x": {"type": "integer", **bounds}, "y": {"type": "number", "multipleOf": 0.25, **bounds}}
    )


def _multiples(rng: random.Random, size: int) -> Schema:
    step = rng.randrange(2, 4 + size)
    return {"type": "integer", "multipleOf": step, "minimum": 0, "maximum": 1000}


def _enumeration(rng: random.Random, size: int) -> Schema:
    return {"enum": [*rng.sample(_WORDS, min(size, len(_WORDS))), size, None, [size], {"a": size}]}


def _string_lengths(rng: random.Random, size: int) -> Schema:
    return {"type": "string", "minLength": size, "maxLength": size + rng.randrange(4)}


def _pattern(rng: random.Random, size: int) -> Schema:
    pattern = rng.choice(
        [
            rf"^[A-Z]{{{size}}}-[0-9]{{2,{size + 2}}}$",
            rf"^(ab|c){{1,{size}}}$",
            rf"^[^a-m]{{0,{size}}}z$",
            r"^\d{3}-\d{4}$",
        ]
    )
    return _object({"code": {"type": "string", "pattern": pattern}})


def _formats(rng: random.Random, size: int) -> Schema:
    names = rng.sample(["uuid", "ipv4", "ipv6"], 1 + size % 3)
    return _object({name: {"type": "string", "format": name} for name in names})


def _array(rng: random.Random, size: int) -> Schema:
    bounds = {"minItems": rng.randrange(size), "maxItems": size}
    return {"type": "array", "items": _scalar(rng, size), **bounds}


def _tuple(rng: random.Random, size: int) -> Schema:
    items = [_scalar(rng, size) for _ in range(size)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": size}


def _flat(rng: random.Random, size: int) -> Schema:
    return _object({f"field_{i}": _scalar(rng, size) for i in range(size)})


def _optional(rng: random.Random, size: int) -> Schema:
    properties = {f"f{i}": _scalar(rng, size) for i in range(size)}
    return _object(properties, rng.sample(list(properties), size // 2))


def _nested(rng: random.Random, size: int) -> Schema:
    schema = _scalar(rng, size)
    for depth in range(size):
        schema = _object({f"level_{depth}": schema})
    return schema


def _matrix(rng: random.Random, size: int) -> Schema:
    schema: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
    for _ in range(1 + size % 3):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1 + size // 4}
    return schema


def _union(rng: random.Random, size: int) -> Schema:
    kinds = [
        _object({"kind": {"const": f"k{i}"}, "value": _scalar(rng, size)}) for i in range(size)
    ]
    return {"anyOf": kinds}


def _mixed_type(rng: random.Random, size: int) -> Schema:
    return _object({"x": {"type": ["integer", "null", "boolean"], "minimum": 0, "maximum": size}})


def _map(rng: random.Random, size: int) -> Schema:
    values = {"type": "integer", "minimum": 0, "maximum": size}
    return {"type": "object", "properties": {}, "additionalProperties": values, "maxProperties": 3}


def _references(rng: random.Random, size: int) -> Schema:
    point = _object({"x": _numbers(rng, size), "y": _numbers(rng, size)})
    points = {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 1 + size // 2}
    return _object({"points": points}, **{"$defs": {"point": point}})


def _tree(rng: random.Random, size: int) -> Schema:
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
    node = _object({"value": _scalar(rng, size), "children": children})
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _list(rng: random.Random, size: int) -> Schema:
    rest = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
    return _object({"head": _scalar(rng, size), "tail": rest})


def _everything(rng: random.Random, size: int) -> Schema:
    parts = rng.sample([_flat, _array, _union, _nested, _tuple, _pattern, _optional], 3)
    return _object({f"part_{i}": part(rng, 1 + size // 2) for i, part in enumerate(parts)})


KINDS: list[Callable[[random.Random, int], Schema]] = [
    _numbers,
    _enumeration,
    _string_lengths,
    _reals,
    _multiples,
    _mixed_type,
    _pattern,
    _formats,
    _array,
    _tuple,
    _flat,
    _optional,
    _nested,
    _matrix,
    _union,
    _map,
    _references,
    _list,
    _tree,
    _everything,
]
