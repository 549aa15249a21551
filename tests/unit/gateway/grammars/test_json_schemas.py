"""What clients' schemas become: equal forms, weaker ones that are named, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, Field, TypeAdapter

from gateway.grammars.json_schemas import SchemaReader
from gateway.grammars.patterns import enforceable_pattern
from protocol.errors import InvalidRequest
from tests.paths import DEMO_MODEL

STRING: dict[str, Any] = {"type": "string"}


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer(str(DEMO_MODEL / "tokenizer.json"), slices=[])


@pytest.fixture
def accepts(vocabulary):
    def check(schema: Any, text: str, strict: bool = False) -> bool:
        reader = SchemaReader(schema, "s", strict)
        matcher = LLMatcher(vocabulary, reader.grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = vocabulary.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return check


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


EQUAL = [
    ({"type": "string", "format": "path"}, ['"/a"'], ["1"]),
    ({"type": "string", "format": "password"}, ['"x"'], ["1"]),
    ({"type": "object", "propertyNames": STRING}, ['{"a":1}'], ["1"]),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, ['{"ab":1}', "{}"], ['{"b":1}']),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b."]}, "additionalProperties": STRING},
        ['{"a":"x"}', '{"b.":"x"}'],
        ['{"bc":"x"}', '{"a":1}'],
    ),
    ({"type": "object", "propertyNames": False}, ["{}"], ['{"a":1}']),
    ({"type": "array", "uniqueItems": False}, ["[1,1]"], ["1"]),
    ({"type": "string", "nullable": True}, ['"a"', "null"], ["1"]),
    ({"enum": ["a"], "type": "string", "nullable": True}, ['"a"', "null"], ['"b"']),
    ({"$defs": {"a": STRING}, "$ref": "#/$defs/a", "nullable": True}, ['"a"', "null"], ["1"]),
    ({"anyOf": [STRING, {"type": "integer"}], "nullable": True}, ['"a"', "1", "null"], ["[]"]),
    ({"oneOf": [STRING, {"type": "integer"}]}, ['"a"', "1"], ["[]"]),
    (
        obj(a=STRING, b=STRING) | {"dependentRequired": {"a": ["b"]}},
        ["{}", '{"b":"x"}', '{"a":"x","b":"y"}'],
        ['{"a":"x"}'],
    ),
    (obj(a=STRING, b=STRING) | {"dependencies": {"a": ["b"]}}, ["{}"], ['{"a":"x"}']),
    (
        obj(a=STRING, b={}) | {"dependentSchemas": {"a": {"properties": {"b": STRING}}}},
        ['{"b":1}', '{"a":"x","b":"y"}'],
        ['{"a":"x","b":1}'],
    ),
    ({"not": STRING}, ["1", "null"], ['"a"']),
    ({"not": False}, ["1"], []),
    ({"type": "object", "unevaluatedProperties": False}, ["{}"], ['{"a":1}']),
    ({"type": "array", "prefixItems": [STRING], "unevaluatedItems": False}, ['["a"]'], ['["a",1]']),
    ({"type": "array", "maxItems": 1.0}, ["[1]"], ["[1,2]"]),
    ({"type": "array", "contains": STRING, "minContains": 0}, ["[1]"], ["1"]),
    (True, ["1", '"a"'], []),
    (obj(a=True, b=False), ['{"a":1}'], ['{"b":1}']),
    (obj(a={"title": "A", "readOnly": True, "example": 1, "x-mine": {}}), ['{"a":1}'], ["1"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), EQUAL)
def test_equal_forms_hold_for_strict_schemas_too(accepts, schema, good, bad):
    assert SchemaReader(schema, "s", strict=True).dropped == []
    assert [text for text in good if not accepts(schema, text, strict=True)] == []
    assert [text for text in bad if accepts(schema, text, strict=True)] == []


OVERLAPPING = [obj(a=STRING) | {"additionalProperties": True}, {"type": "object"}]
WEAKER = [
    ({"items": STRING, "uniqueItems": True}, "/uniqueItems", ['["a","a"]'], ["[1]"]),
    (obj(a={"uniqueItems": True}), "/properties/a/uniqueItems", ['{"a":[1,1]}'], []),
    ({"oneOf": OVERLAPPING}, "/oneOf", ["{}", '{"a":1}'], ["1"]),
    ({"type": "string", "not": {"const": "a"}}, "/not", ['"a"'], ["1"]),
    ({"if": STRING, "then": {"minLength": 2}}, "/if", ['"a"'], []),
    ({"type": "array", "contains": STRING}, "/contains", ["[1]"], ["1"]),
    ({"type": "string", "pattern": r"^(a)\1$"}, "/pattern", ['"ab"'], ["1"]),
    ({"type": "string", "pattern": "^a(?=b)."}, "/pattern", ['"ac"'], ['"b"']),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, "/propertyNames", ['{"abc":1}'], []),
    (
        {"allOf": [obj(a=STRING)], "unevaluatedProperties": False},
        "/unevaluatedProperties", ['{"a":"x"}'], ["1"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "place", "good", "bad"), WEAKER)
def test_what_cannot_be_enforced_is_dropped_and_named_or_refused(accepts, schema, place, good, bad):
    assert SchemaReader(schema, "s", strict=False).dropped == [f"s{place}"]
    assert [text for text in good if not accepts(schema, text)] == []
    assert [text for text in bad if accepts(schema, text)] == []
    with pytest.raises(InvalidRequest, match=f"'{place.rpartition('/')[2]}' at '#") as refused:
        SchemaReader(schema, "s", strict=True)
    assert refused.value.param == "s"


def test_decimals_keep_what_their_look_ahead_says(accepts):
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    assert enforceable_pattern(pattern) == ([r"^[+-]?0*\d*\.?\d*$", "[^-+.]"], True)
    schema = {"type": "string", "pattern": pattern}
    for text in ('"1"', '"-12.5"', '".5"', '"1."'):
        assert accepts(schema, text, strict=True), text
    for text in ('""', '"."', '"-"', '"a"'):
        assert not accepts(schema, text, strict=True), text


class Address(BaseModel):
    street: str
    zip_code: str = Field(pattern=r"^\d{5}$")


class Person(BaseModel):
    name: str
    tags: set[str]
    address: Address | None = None
    pet: Literal["cat", "dog"] | int
    extra: dict[str, list[Address]] = {}


def test_pydantic_s_own_schemas(accepts):
    schema = TypeAdapter(Person).json_schema()
    whole = '{"name":"A","tags":["a"],"address":{"street":"b","zip_code":"12345"},"pet":"cat"}'
    assert accepts(schema, whole)
    assert not accepts(schema, whole.replace("12345", "1234"))
    assert SchemaReader(schema, "s", strict=False).dropped == ["s/properties/tags/uniqueItems"]


ENDLESS = [
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"anyOf": [{"$ref": "#"}, {"$ref": "#/anyOf/0"}]},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    obj(name=STRING, more={"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]})
    | {"required": ["name", "more"]},
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_a_schema_that_requires_itself_is_refused(schema):
    with pytest.raises(InvalidRequest, match="no finite value"):
        SchemaReader(schema, "s", strict=False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"type": "null"}, obj(next={"$ref": "#"}) | {"required": ["next"]}]},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"$defs": {"n": obj(kids={"items": {"$ref": "#/$defs/n"}})}, "$ref": "#/$defs/n"},
        {"$ref": "#nowhere"},
    ],
)  # fmt: skip
def test_a_schema_that_can_end_is_not_refused(schema):
    assert SchemaReader(schema, "s", strict=False).dropped == []


def chain(count: int, link: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Definitions that refer each to the next one."""
    links = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$defs": {**links, f"d{count}": STRING}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "link",
    [
        lambda following: following,
        lambda following: obj(a=following) | {"required": ["a"]},
        lambda following: {"type": "array", "items": following},
        lambda following: {"anyOf": [{"type": "null"}, following]},
        lambda following: {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/d0"}, following]},
    ],
    ids=["alone", "property", "items", "branch", "circles"],
)
def test_references_that_lead_too_far_are_refused_before_they_are_compiled(link):
    SchemaReader(chain(60, link), "s", strict=False)
    with pytest.raises(InvalidRequest, match="nests too deeply: more than 500 levels"):
        SchemaReader(chain(4000, link), "s", strict=False)


def chain_in_branch(count: int) -> dict[str, Any]:
    """A chain below alternatives, which are compiled by themselves to see whether they are
    apart."""
    made = chain(count, lambda following: following)
    return {"$defs": made["$defs"], "oneOf": [{"$ref": made["$ref"]}, {"type": "integer"}]}


def chain_of_part(count: int) -> dict[str, Any]:
    """A chain in a part with an identifier: what its references name is short at the root."""
    part = {"$id": "http://x/part"} | chain(count, lambda following: following)
    return {"$defs": dict.fromkeys(part["$defs"], STRING), **obj(a=part)}


def circle(count: int) -> dict[str, Any]:
    """Definitions that refer to each other. A search that begins at the middle one and goes to the
    middle of each half first is shallow; one that goes to the next definition each time is not."""
    inner: dict[int, list[int]] = {place: [] for place in range(count)}
    halves = [(0, count)]
    while halves:
        low, high = halves.pop()
        middle = (low + high) // 2
        for half in ((low, middle), (middle + 1, high)):
            if half[0] < half[1]:
                inner[middle].append(sum(half) // 2)
                halves.append(half)
    links = {
        f"d{place}": obj(
            **{f"p{each}": {"$ref": f"#/$defs/d{each}"} for each in (place + 1, *more)}
        )
        for place, more in inner.items()
    }
    entries = obj(first={"$ref": "#/$defs/d0"}, middle={"$ref": f"#/$defs/d{count // 2}"})
    return {"$defs": {**links, f"d{count}": STRING}, **entries}


def named_chain(count: int, name: dict[str, str], reference: str) -> dict[str, Any]:
    """Definitions that refer each to the next one by its own name, a format with a number."""
    links = {
        f"d{place}": {key: each.format(place) for key, each in name.items()}
        | ({"$ref": reference.format(place + 1)} if place < count else {})
        for place in range(count + 1)
    }
    return {"$id": "http://x/root", "$defs": links, "$ref": reference.format(0)}


@pytest.mark.parametrize(
    ("made", "fine"),
    [
        (chain_in_branch, 100),
        (chain_of_part, 60),
        (circle, 60),
        (lambda count: named_chain(count, {"$anchor": "a{}"}, "#a{}"), 60),
        (lambda count: named_chain(count, {"$id": "http://x/{}"}, "http://x/{}"), 60),
        (lambda count: named_chain(count, {}, "http://x/root#/$defs/d{}"), 60),
    ],
    ids=["oneOf", "part", "circle", "anchors", "identifiers", "absolute"],
)
def test_no_way_to_lead_too_far_reaches_the_compiler(monkeypatch, vocabulary, made, fine):
    reader = SchemaReader(made(fine), "s", strict=False)
    assert not LLMatcher(vocabulary, reader.grammar, log_level=0).is_error()
    monkeypatch.setattr("gateway.grammars.json_schemas.LLMatcher", None)
    with pytest.raises(InvalidRequest, match="nests too deeply: more than 500 levels"):
        SchemaReader(made(2000), "s", strict=False)


def test_definitions_that_do_not_lead_to_each_other_do_not_add_up():
    parts = {f"d{place}": obj(a={"$ref": "#/$defs/leaf"}) for place in range(1000)}
    each = {f"p{place}": {"$ref": f"#/$defs/d{place}"} for place in range(1000)}
    data = {"enum": [{"id": "x"}, list(range(200_000))]}
    reader = SchemaReader({"$defs": {**parts, "leaf": data}, **obj(**each)}, "s", strict=False)
    assert reader.dropped == []


def test_a_schema_that_nests_too_deeply_is_refused():
    schema: dict[str, Any] = {}
    for _ in range(3000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="nests too deeply"):
        SchemaReader(schema, "s", strict=False)


@pytest.mark.parametrize(
    ("schema", "dropped"),
    [
        ({"type": "object", "patternProperties": {"^f": STRING, "o$": {}}}, "/patternProperties"),
        ({"type": "string", "pattern": "(?<=a)b*"}, "/pattern"),
        ({"type": "integer", "multipleOf": 0.123456789}, "/multipleOf"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "/minProperties"),
        (obj(a={}, b={}) | {"maxProperties": 0}, "/maxProperties"),
    ],
)
def test_what_only_the_compiler_refuses_is_dropped_then(vocabulary, schema, dropped):
    reader = SchemaReader(schema, "s", strict=False)
    for _ in range(2):
        trouble = LLMatcher.validate_grammar(reader.grammar)
        if trouble:
            assert reader.try_weaken(trouble), trouble
    assert reader.dropped == [f"s{dropped}"]
    assert not reader.try_weaken("Resource 'http://x' is not present")


@pytest.mark.parametrize("pattern", ["(", r"\bword\b", r"\p{Foo}", "a$b", r"\cA"])
def test_a_pattern_that_cannot_be_followed_affects_no_other(vocabulary, pattern):
    digits = STRING | {"pattern": "^[0-9]+$"}
    schema = obj(
        zip=digits,
        bad=STRING | {"pattern": pattern},
        tags={"type": "object", "patternProperties": {"^t": digits, pattern: STRING}},
        ids={"type": "object", "patternProperties": {"^i": digits}},
        named={"type": "object", "propertyNames": {"pattern": pattern}},
        coded={"type": "object", "propertyNames": {"pattern": "^[0-9]+$"}},
    )
    reader = SchemaReader(schema, "s", strict=False)
    trouble = LLMatcher.validate_grammar(reader.grammar)
    assert reader.try_weaken(trouble), trouble
    assert LLMatcher.validate_grammar(reader.grammar) == ""
    places = ("bad/pattern", "tags/patternProperties", "named/propertyNames/pattern")
    assert reader.dropped == [f"s/properties/{each}" for each in places]
    assert reader.schema["properties"]["zip"]["pattern"] == "^[0-9]+$"
    assert reader.schema["properties"]["ids"]["patternProperties"] == {"^i": digits}
    assert reader.schema["properties"]["coded"]["patternProperties"].keys() == {"^[0-9]+$"}


def test_a_schema_is_not_changed():
    schema = {"type": "array", "uniqueItems": True, "items": {"format": "path", "nullable": True}}
    before = json.dumps(schema)
    SchemaReader(schema, "s", strict=False)
    assert json.dumps(schema) == before
