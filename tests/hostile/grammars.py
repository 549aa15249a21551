"""Schemas and grammars that are large, deep, wide or ambiguous, at the limits of `Sizes`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.hostile.sizes import Sizes

Schema = dict[str, Any]


def wide(sizes: Sizes, optional: int = 480) -> Schema:
    """As many optional properties in a row as are allowed."""
    count = min(optional, sizes.many(4))
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def required(sizes: Sizes) -> Schema:
    """3,000 properties, all of them required."""
    names = [f"p{i}" for i in range(min(3000, sizes.many(5)))]
    return {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "required": names,
    }


def deep(sizes: Sizes) -> Schema:
    """Objects in objects, to the depth that JSON parsers accept."""
    schema: Schema = {"type": "string"}
    for _ in range(min(60, sizes.many(4))):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def enumeration(sizes: Sizes) -> Schema:
    """An enumeration as long as a grammar may be."""
    return {"enum": [f"{i:07}" for i in range(sizes.grammar_chars // 12)]}


def alternatives(sizes: Sizes) -> Schema:
    """Many alternatives that differ only at their ends."""
    count = min(500, sizes.many(6))
    return {"anyOf": [wide(sizes, 3) | {"required": [f"p{i % 3}"]} for i in range(count)]}


def recursive(sizes: Sizes) -> Schema:
    """A schema that refers to itself in all its properties."""
    parts = {f"p{i}": {"$ref": "#/$defs/a"} for i in range(min(200, sizes.many(4)))}
    return {"$defs": {"a": {"type": "object", "properties": parts}}, "$ref": "#/$defs/a"}


def counted(sizes: Sizes) -> Schema:
    """Nested repetitions with large counts."""
    inner = {"type": "array", "items": {"type": "string", "pattern": "a{1,500}b{1,500}"}}
    return {"type": "array", "minItems": 500, "maxItems": 5000, "items": inner}


def numbers(sizes: Sizes) -> Schema:
    """As many numbers as a body may hold, most of them more than a grammar may."""
    return {"enum": [1.5e300] * min(sizes.values - 200, (sizes.body_bytes - 500) // 9)}


def unenforceable(sizes: Sizes) -> Schema:
    """As many alternatives that cannot be told apart, and dropped keywords, as fit."""
    count = min(sizes.parts // 12, sizes.grammar_chars // 150)
    one = {"oneOf": [{"type": "object"}, {"properties": {"a": {"uniqueItems": True}}}]}
    return {"type": "object", "properties": {f"p{i}": one for i in range(count)}, "required": []}


def endless(sizes: Sizes) -> Schema:
    """A long chain of references: each must be followed to know whether the chain ends."""
    count = min(sizes.parts // 8, sizes.grammar_chars // 60)
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def look_around(sizes: Sizes) -> Schema:
    """A pattern of as many groups as fit."""
    return {"type": "string", "pattern": "(?=" * (sizes.grammar_chars // 8) + "a"}


def intersected(sizes: Sizes) -> Schema:
    """Patterns that must all hold for one text: whether any is left takes exponential time."""
    return {"allOf": [{"pattern": f"[^{chr(97 + i)}]{{{i}}}"} for i in range(min(26, sizes.parts))]}


SCHEMAS: dict[str, Callable[[Sizes], Schema]] = {
    "wide": wide,
    "3,000 required": required,
    "deep": deep,
    "enum": enumeration,
    "alternatives": alternatives,
    "recursive": recursive,
    "counted": counted,
    "numbers": numbers,
    "unenforceable": unenforceable,
    "endless": endless,
    "look-around": look_around,
    "intersected": intersected,
}


def regex(sizes: Sizes) -> str:
    """A long regular expression."""
    return "(a|b)" * (sizes.grammar_chars // 5)


def counted_regex(sizes: Sizes) -> str:
    """A short one with counts inside counts."""
    return "((a{1,100}b?){1,100}c?){1,100}"


def texts(sizes: Sizes) -> list[str]:
    """As many choices of as many characters as allowed."""
    chars = sizes.grammar_chars // sizes.choice_texts - 20
    return [f"{i:06}" + "x" * chars for i in range(sizes.choice_texts)]


def ambiguous(sizes: Sizes) -> str:
    """300 rules of which every one matches the same texts."""
    count = min(300, sizes.items)
    rules = "\n".join(
        f'r{i}: "a" r{(i + 1) % count} | "a" r{(i + 7) % count} | "a"' for i in range(count)
    )
    return f"start: {' | '.join(f'r{i}' for i in range(count))}\n{rules}\n"


def long_lark(sizes: Sizes) -> str:
    """A Lark grammar of the greatest length."""
    rule = 'r%d: "abc" | "abd"\n'
    count = sizes.grammar_chars // 30
    return (
        "start: "
        + " ".join(f"r{i}" for i in range(count))
        + "\n"
        + "".join(rule % i for i in range(count))
    )


def gbnf(sizes: Sizes) -> str:
    """A GBNF text of the greatest length."""
    head = "root ::= a\na ::= "
    return head + '"x" | ' * ((sizes.gbnf_chars - len(head) - 10) // 6) + '"y"\n'


def too_long_gbnf(sizes: Sizes) -> str:
    """A GBNF text far above the limit."""
    return "root ::= " + '"x" | ' * (sizes.body_bytes // 16) + '"y"\n'


def tools(sizes: Sizes, strict: bool = False) -> list[dict[str, Any]]:
    """As many tools as allowed, with as long schemas as allowed together."""
    size = sizes.tools_bytes // sizes.tools - 200
    names = [f"parameter_{i:04}" for i in range(max(1, min(size // 60, 400)))]
    parameters = {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 99} for name in names},
        "required": names,
    }
    assert len(json.dumps(parameters)) < sizes.tools_bytes
    return [
        {"name": f"tool_{i}", "description": "x" * 50, "parameters": parameters, "strict": strict}
        for i in range(sizes.tools)
    ]
