"""Patterns that hold for one text are counted wherever a schema's parts come together."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.grammars.grammar import MAX_PATTERNS_TOGETHER, lark_grammar
from gateway.grammars.intersections import MAX_STEPS, patterns_together
from gateway.grammars.json_schemas import SchemaReader
from protocol.errors import InvalidRequest

NUM = 20


def pattern(number: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"[^{chr(97 + number)}]{{{number}}}"}


EACH = [pattern(number) for number in range(NUM)]
CHAIN = {f"d{i}": {**each, "$ref": f"#/$defs/d{i + 1}"} for i, each in enumerate(EACH)}
ALL = {"allOf": [{"$ref": f"#/$defs/d{i}"} for i in range(NUM)]}
CIRCLE = {f"d{i}": {**each, "properties": {"b": ALL}} for i, each in enumerate(EACH)}
TOGETHER = {
    "allOf": {"allOf": EACH},
    "allOf of a property": {"allOf": [{"properties": {"a": each}} for each in EACH]},
    "allOf of items": {"allOf": [{"items": each} for each in EACH]},
    "references": {"$defs": {**CHAIN, f"d{NUM}": {}}, "$ref": "#/$defs/d0"},
    "alternatives inside allOf": {"allOf": [{"anyOf": [each, EACH[0]]} for each in EACH]},
    "a circle": {"$defs": CIRCLE, "$ref": "#/$defs/d0"},
    "anchors": {
        "$defs": {f"d{i}": {"$anchor": f"a{i}", **each} for i, each in enumerate(EACH)},
        "allOf": [{"$ref": f"#a{i}"} for i in range(NUM)],
    },
}


@pytest.mark.parametrize("schema", TOGETHER.values(), ids=TOGETHER)
def test_patterns_that_come_together_are_counted_and_too_many_refused(schema):
    assert patterns_together(schema) >= NUM
    with pytest.raises(
        InvalidRequest, match=r"patterns that must hold for one text|nests too deep"
    ):
        SchemaReader(schema, "s", strict=False)


@pytest.mark.parametrize(
    ("schema", "count"),
    [
        (True, 0),
        ({"anyOf": EACH}, 1),
        ({"properties": {str(number): each for number, each in enumerate(EACH)}}, 1),
        ({"prefixItems": EACH}, 1),
        ({"type": "object", "properties": {"v": EACH[0], "next": {"$ref": "#"}}}, 1),
        ({"allOf": [{"minLength": 1}, {"format": "email"}, EACH[3]]}, 3),
        ({"patternProperties": {"^a": {}, "^b": {}}}, 2),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}], "pattern": "a"}, 2),
    ],
)
def test_what_holds_for_different_texts_does_not_add_up(schema, count):
    assert patterns_together(schema) == count


def test_a_schema_that_doubles_at_every_level_is_given_up():
    links = {}
    for i in range(40):
        following = {"$ref": f"#/$defs/d{i + 1}"}
        links[f"d{i}"] = {"allOf": [{"properties": {"a": following, "b": following}}] * 2}
    schema = {"$defs": {**links, "d40": EACH[0]}, "$ref": "#/$defs/d0"}
    assert patterns_together(schema) == MAX_STEPS


@pytest.mark.parametrize("operator", ["&", "&~"])
def test_a_client_s_grammar_may_intersect_and_negate_a_few_times(operator):
    def grammar(count: int) -> str:
        return "start: X\nX: /a*/" + f" {operator} /b/" * count

    most = MAX_PATTERNS_TOGETHER // len(operator)
    assert lark_grammar(grammar(most), "g") == grammar(most)
    with pytest.raises(InvalidRequest, match="intersect and negate"):
        lark_grammar(grammar(most + 1), "g")
