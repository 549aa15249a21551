"""Objects of strict schemas have no properties that the schema does not list."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.grammars.json_schemas import SchemaReader
from tests.paths import DEMO_MODEL

STRING: dict[str, Any] = {"type": "string"}
POINT: dict[str, Any] = {
    "type": "object",
    "title": "Point",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "x-order": ["x"],
}
OTHER = {**POINT, "properties": {"y": {"type": "integer"}}, "required": ["y"]}
USED = {"$defs": {"Point": POINT}, "type": "array", "items": {"$ref": "#/$defs/Point"}}
ALSO = '{"x":1,"also":2}'


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer(str(DEMO_MODEL / "tokenizer.json"), slices=[])


@pytest.fixture
def accepts(vocabulary: LLTokenizer):
    def check(schema: Any, text: str, strict: bool) -> bool:
        reader = SchemaReader(schema, "s", strict)
        matcher = LLMatcher(vocabulary, reader.grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = vocabulary.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return check


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (POINT, '{"x":1}', ALSO),
        (POINT | {"nullable": True}, "null", ALSO),
        (USED, '[{"x":1}]', f"[{ALSO}]"),
        ({"anyOf": [POINT, OTHER]}, '{"y":1}', '{"x":1,"y":1}'),
        ({"oneOf": [POINT, OTHER]}, '{"y":1}', '{"x":1,"y":1}'),
        ({"allOf": [POINT]}, '{"x":1}', ALSO),
        ({"additionalProperties": POINT}, '{"a":{"x":1}}', f'{{"a":{ALSO}}}'),
        ({"type": "object", "properties": {"not": POINT}}, '{"not":{"x":1}}', f'{{"not":{ALSO}}}'),
        (POINT | {"properties": {}}, '{"x":1}', '{"x":1,"y":1}'),
    ],
)
def test_an_object_that_lists_its_properties_has_no_others(accepts, schema, good, bad) -> None:
    assert accepts(schema, good, strict=True)
    assert not accepts(schema, bad, strict=True)
    assert accepts(schema, bad, strict=False)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object"}, '{"a":1}'),
        (POINT | {"additionalProperties": True}, ALSO),
        (POINT | {"patternProperties": {"^a": {}}}, ALSO),
        (POINT | {"minProperties": 2}, ALSO),
        ({"allOf": [POINT, OTHER]}, '{"x":1,"y":1}'),
        ({"allOf": [POINT], "properties": {"y": {}}}, '{"x":1,"y":1}'),
        ({"anyOf": [POINT, OTHER], "required": ["z"]}, '{"x":1,"z":1}'),
        ({"$defs": {"Point": POINT}, "$ref": "#/$defs/Point", "required": ["z"]}, '{"x":1,"z":1}'),
    ],
)
def test_what_says_more_of_other_properties_stays_open(accepts, schema, text) -> None:
    assert accepts(schema, text, strict=True)
