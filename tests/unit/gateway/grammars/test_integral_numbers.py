"""Integers that a schema writes as `2.0`: equal to `2` by the standard, wherever they stand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from gateway.grammars.json_schemas import SchemaReader
from gateway.grammars.structural_tags import structural_tag_grammar
from protocol.errors import InvalidRequest
from tests.paths import DEMO_MODEL

INTEGER: dict[str, Any] = {"type": "integer"}
STRING: dict[str, Any] = {"type": "string"}
TEXTS = ("0", "1", "2", "7", "10", "11", "1.5", '"a"', '"ab"', "[]", "[1]", "[1,2]", '{"n":2}')
CASES = [
    (INTEGER | {"const": 1.0}, ["1"]),
    ({"const": -0.0}, ["0"]),
    ({"const": {"n": 2.0}}, ['{"n":2}']),
    (INTEGER | {"enum": [1.0, 2.0]}, ["1", "2"]),
    (INTEGER | {"multipleOf": 5.0}, ["0", "10"]),
    (INTEGER | {"multipleOf": 1.0, "maximum": 10.0}, ["0", "1", "2", "7", "10"]),
    (INTEGER | {"exclusiveMinimum": 1e0, "exclusiveMaximum": 1e1}, ["2", "7"]),
    (INTEGER | {"minimum": 10.0}, ["10", "11"]),
    (STRING | {"minLength": 2.0}, ['"ab"']),
    (STRING | {"maxLength": 1.0}, ['"a"']),
    ({"type": "array", "minItems": 2.0}, ["[1,2]"]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1.0}, ["[]", "[1]"]),
    ({"type": "array", "contains": STRING, "minContains": 0.0}, ["[]", "[1]", "[1,2]"]),
    ({"type": "object", "minProperties": 1.0}, ['{"n":2}']),
    ({"$ref": "#/parts/a", "parts": {"a": STRING | {"minLength": 2.0}}}, ['"ab"']),
    ({"$ref": "#/x/y/0", "x": {"y": [{"type": "array", "minItems": 2.0}]}}, ["[1,2]"]),
]


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer(str(DEMO_MODEL / "tokenizer.json"), slices=[])


def is_accepted(vocabulary: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = vocabulary.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(("schema", "accepted"), CASES)
def test_an_integral_number_is_the_integer_that_it_equals(vocabulary, schema, accepted):
    reader = SchemaReader(schema, "s", strict=True)
    assert [text for text in TEXTS if is_accepted(vocabulary, reader.grammar, text)] == accepted


def test_structural_tags_take_them_too(vocabulary):
    tag = {"begin": "<f>", "schema": STRING | {"minLength": 2.0}, "end": "</f>"}
    grammar = structural_tag_grammar({"structures": [tag], "triggers": ["<f"]}, "s", {}.get)
    assert is_accepted(vocabulary, grammar, '<f>"ab"</f>')
    assert not is_accepted(vocabulary, grammar, '<f>"a"</f>')


def test_numbers_beyond_exact_ones_are_left_as_they_are():
    reader = SchemaReader({"enum": [2.0**53, 2.0**54, 1e300]}, "s", strict=False)
    assert reader.schema == {"enum": [2**53, 2.0**54, 1e300]}
    assert [type(each) for each in reader.schema["enum"]] == [int, float, float]


@pytest.mark.parametrize("place", ["items", "parts"])
def test_a_schema_that_requires_itself_is_found_whichever_way_its_counts_are_written(place):
    schema = {"type": "array", "items": {"$ref": "#"}, "minItems": 1.0}
    wrapped = {"$ref": "#/parts/a", "parts": {"a": schema}} if place == "parts" else schema
    with pytest.raises(InvalidRequest, match="no finite value"):
        SchemaReader(wrapped, "s", strict=False)


COUNT = st.integers(0, 3)
NUMBER = st.integers(-20, 20)
VALUE = st.recursive(
    NUMBER | st.booleans() | st.none() | st.just("a") | st.just(0.5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("n"), inner),
    max_leaves=4,
)
LEAVES = st.one_of(
    st.fixed_dictionaries({"const": VALUE}),
    st.fixed_dictionaries({"enum": st.lists(VALUE, min_size=1, max_size=3)}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={
            "minimum": NUMBER, "exclusiveMaximum": NUMBER, "multipleOf": st.integers(1, 9),
            "default": VALUE,
        },
    ),
    st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": COUNT}),
)  # fmt: skip
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner},
            optional={"minItems": COUNT, "maxItems": st.integers(3, 5), "minContains": COUNT,
                      "contains": inner},
        ),
        st.fixed_dictionaries(
            {"properties": st.dictionaries(st.sampled_from(["a", "b"]), inner)},
            optional={"minProperties": COUNT, "additionalProperties": inner},
        ),
        st.builds(lambda each: {"$ref": "#/parts/0", "parts": [each]}, inner),
        st.builds(lambda each: {"anyOf": [each, {"type": "null"}]}, inner),
        st.builds(lambda one, other: {"oneOf": [one, other]}, inner, inner),
    ),
    max_leaves=4,
)  # fmt: skip


def written(value: Any, form: str) -> str:
    """JSON in which each integer has the form, such as `{}.0`."""
    if isinstance(value, list):
        return f"[{','.join(written(each, form) for each in value)}]"
    if isinstance(value, dict):
        pairs = (f'"{key}":{written(each, form)}' for key, each in value.items())
        return f"{{{','.join(pairs)}}}"
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return form.format(value) if is_integer else msgspec.json.encode(value).decode()


@given(SCHEMAS, st.sampled_from(["{}.0", "{}e0", "{}.00E+0"]))
def test_every_integer_of_a_schema_may_be_written_as_a_float(schema, form):
    plain = SchemaReader(schema, "s", strict=False)
    other = SchemaReader(msgspec.json.decode(written(schema, form)), "s", strict=False)
    assert (other.grammar, other.dropped) == (plain.grammar, plain.dropped)
