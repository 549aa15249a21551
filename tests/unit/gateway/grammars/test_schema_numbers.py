"""Counts and numbers of schemas that are too large: named by their place, or without effect."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from gateway.grammars.grammar_checker import plain_trouble
from gateway.grammars.json_schemas import SchemaReader
from gateway.grammars.schema_numbers import MAX_COUNT
from protocol.errors import InvalidRequest

HUGE = 10**12
OF = {"Length": "string", "Items": "array", "Properties": "object"}
COUNTED = pytest.mark.parametrize("name", OF)


def inside(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "array", "items": schema}}}


@COUNTED
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("count", [HUGE, MAX_COUNT + 1, 2**64, 1e300, -1, 1.5])
def test_a_least_count_that_no_answer_reaches_is_named(name, count, strict):
    with pytest.raises(InvalidRequest) as refused:
        SchemaReader(inside({"type": OF[name], f"min{name}": count}), "s", strict)
    where = f"'s': 'min{name}' at '#/properties/a/items'"
    assert str(refused.value) == f"{where} must be an integer from 0 to {MAX_COUNT}"
    assert refused.value.param == "s"


@COUNTED
@pytest.mark.parametrize("count", [-1, 1.5])
def test_a_wrong_largest_count_is_named(name, count):
    with pytest.raises(InvalidRequest, match=f"'max{name}' at '#/properties/a/items'"):
        SchemaReader(inside({"type": OF[name], f"max{name}": count}), "s", strict=False)


@COUNTED
@pytest.mark.parametrize("count", [HUGE, MAX_COUNT + 1, 2**64, 1e300])
def test_a_largest_count_that_every_answer_keeps_has_no_effect(name, count):
    reader = SchemaReader(inside({"type": OF[name], f"max{name}": count}), "s", strict=True)
    assert LLMatcher.validate_grammar(reader.grammar) == ""
    assert reader.schema == inside({"type": OF[name]}) | {"additionalProperties": False}
    assert reader.dropped == []


@COUNTED
def test_the_largest_counts_compile(name):
    least = {"type": OF[name], f"min{name}": MAX_COUNT, f"max{name}": MAX_COUNT}
    reader = SchemaReader(least, "s", strict=True)
    assert reader.schema == least
    assert LLMatcher.validate_grammar(reader.grammar) == ""


def test_properties_and_values_may_have_the_name_of_a_count():
    schema = {
        "properties": {"minLength": {"type": "integer"}, "maxItems": {"const": HUGE}},
        "enum": [{"minLength": HUGE}],
        "const": {"maxLength": -1},
    }
    assert SchemaReader(schema, "s", strict=True).schema == schema


@pytest.mark.parametrize("key", ["maximum", "const", "multipleOf", "minLength"])
def test_a_number_that_no_float_holds_is_named(key):
    with pytest.raises(InvalidRequest, match=f"the number at '#/properties/a/items/{key}' is out"):
        SchemaReader(inside({key: 10**400}), "s", strict=False)
    with pytest.raises(InvalidRequest, match="the number at '#/enum/1' is out"):
        SchemaReader({"enum": [1, -(10**309)]}, "s", strict=False)


@pytest.mark.parametrize("bound", [{"minimum": 1e-300}, {"exclusiveMaximum": -1e-300}])
def test_a_bound_of_too_many_digits_is_left_out_and_named(bound):
    (key,) = bound
    reader = SchemaReader(inside({"type": "number", **bound}), "s", strict=False)
    while trouble := LLMatcher.validate_grammar(reader.grammar):
        assert reader.try_weaken(trouble), trouble
    assert reader.dropped == [f"s/properties/a/items/{key}"]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start: /a{5000000000}/", "a pattern or a length in it has a count of more than 4294967"),
        ('start: %json {"type":"string","minLength":5000000000}', "a pattern or a length in it"),
        (f'start: %json {{"maximum":1{"0" * 400}}}', "a number in it is out of range"),
    ],
)
def test_a_grammar_s_own_numbers_are_refused_in_the_same_words(grammar, words):
    assert plain_trouble(LLMatcher.validate_grammar(grammar)).startswith(words)
