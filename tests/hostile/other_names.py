"""Attacks by limits, stops and formats under the names that other servers have."""

from __future__ import annotations

from tests.hostile import grammars
from tests.hostile.bodies import SHARED
from tests.hostile.sizes import Body, Field, Sizes

_ANY = {"type": "object", "properties": {"a": {"type": "string"}}}


def _formats(sizes: Sizes) -> dict[str, Body]:
    """Formats by their kinds, under every name that a part of one may have."""
    regex, grammar = "[a-z]*" * (sizes.grammar_chars // 100), 'start: "x"'
    schema = {"name": "n" * 64, "description": "d", "schema": _ANY, "strict": False}
    return {
        "any text": {"type": "text"},
        "object of a schema": {"type": "json_object", "schema": _ANY},
        "object of a value": {"type": "json_object", "value": _ANY},
        "named schema": {"type": "json_schema", "json_schema": schema},
        "plain schema": {"type": "json_schema", **schema},
        "schema as a value": {"type": "json_schema", "value": _ANY},
        "pattern": {"type": "regex", "pattern": regex},
        "regex": {"type": "regex", "regex": regex},
        "regex as a value": {"type": "regex", "value": regex},
        "grammar": {"type": "grammar", "grammar": grammar},
        "grammar as a value": {"type": "grammar", "value": grammar},
        "tags": {
            "type": "structural_tag",
            "structures": [{"begin": "<a>", "schema": _ANY, "end": "</a>"}],
            "triggers": ["<a>"],
        },
        "tags in a format": {"type": "structural_tag", "format": {"type": "triggered_tags"}},
    }


def format_fields(*path: str) -> dict[str, Field]:
    """Formats of every kind in the field at a path."""

    def attack(name: str) -> Field:
        def fields(sizes: Sizes) -> Body:
            value = _formats(sizes)[name]
            for each in reversed(path):
                value = {each: value}
            return value

        return fields

    return {f"{'.'.join(path)}: {name}": attack(name) for name in _formats(Sizes())}


_SHORT = {"disable_any_whitespace": True, "disable_fallback": True, "backend": "b"}
OTHER_NAMES: dict[str, Field] = {
    **{
        name: lambda sizes, name=name: {name: sizes.output}  # type: ignore[misc]
        for name in (
            "max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens",
            "n_predict", "num_predict", "min_new_tokens",
        )
    },
    "stop_sequences": lambda sizes: {"stop_sequences": ["x" * sizes.stop_chars] * sizes.stops},
    "format": lambda sizes: {"format": _ANY},
    "json_schema": lambda sizes: {"json_schema": next(iter(grammars.SCHEMAS.values()))(sizes)},
    "regex": lambda sizes: {"regex": "[a-z]*" * (sizes.grammar_chars // 100)},
    "grammar": lambda sizes: {"grammar": "root ::= " + '"x" ' * (sizes.gbnf_chars // 4 - 4)},
    "ebnf": lambda sizes: {"ebnf": "root ::= " + '"x" ' * (sizes.gbnf_chars // 4 - 4)},
    "structural_tag": lambda sizes: {"structural_tag": _formats(sizes)["tags"]},
    "whitespace": lambda sizes: {
        "structured_outputs": {"json": _ANY, "whitespace_pattern": "w" * 1000, **_SHORT}
    },
    **format_fields("response_format"),
}  # fmt: skip
"""For every endpoint that generates."""
SAMPLING: dict[str, Field] = {f"as in chats: {name}": field for name, field in SHARED.items()}
"""What chats and completions share, for the other endpoints that generate."""
