"""Structured output over HTTP: what is asked for becomes the workers' grammar, or a named error."""

from __future__ import annotations

import json

import pytest

from gateway.grammars.grammar import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**SCHEMA, "additionalProperties": False}
NAMED = {"name": "thing", "schema": SCHEMA, "strict": True, "description": "a thing"}
WISHES = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, json_object_grammar()),
    (
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        json_schema_grammar(CLOSED),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
        json_object_grammar(),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, json_schema_grammar(SCHEMA)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        json_schema_grammar(SCHEMA),
    ),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, json_schema_grammar(SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, json_object_grammar()),
    ({"structured_outputs": {"regex": "[a-c]+"}}, regex_grammar("[a-c]+")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, choice_grammar(["yes", "no"])),
    ({"structured_outputs": {"grammar": 'start: "x"'}}, 'start: "x"'),
    (
        {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
        regex_grammar("a"),
    ),
]
DENIED = {"not": {"const": 1}}
ERRORS = [
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {**NAMED, "schema": {"not": {"if": 1}}},
            }
        },
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": '{"type": 3}'}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
]


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
@pytest.mark.parametrize(("fields", "grammar"), WISHES)
def test_what_is_asked_for_becomes_the_grammar_of_every_choice(api, endpoint, fields, grammar):
    response = getattr(api, endpoint)(n=2, **fields)
    assert response.status_code == 200, response.text
    found = [request.sampling.grammar for request in api.generator.requests]
    assert found == [grammar] * 2


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
@pytest.mark.parametrize(("fields", "param"), ERRORS)
def test_what_cannot_be_had_is_refused_by_name(api, endpoint, fields, param):
    response = getattr(api, endpoint)(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert api.generator.requests == []


UNIQUE = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
LAX = {"name": "thing", "schema": UNIQUE}
FUNCTION = {"name": "f", "parameters": UNIQUE}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": LAX}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": UNIQUE}}, "structured_outputs.json"),
        ({"guided_json": json.dumps(UNIQUE)}, "guided_json"),
    ],
)
def test_what_is_dropped_of_a_schema_is_named_in_the_header(api, fields, param):
    response = api.complete(**fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-baton-ignored"] == f"{param}/properties/tags/uniqueItems"
    [request] = api.generator.requests
    assert "uniqueItems" not in request.sampling.grammar


def test_a_strict_schema_is_refused_for_what_would_be_dropped(api):
    strict = {"type": "json_schema", "json_schema": {**LAX, "strict": True}}
    error = api.complete(response_format=strict).json()["error"]
    assert "'uniqueItems' at '#/properties/tags' cannot be enforced" in error["message"]
    assert error["param"] == "response_format.json_schema.schema"


def test_what_is_dropped_of_a_tool_is_named_only_where_it_constrains(tools_api):
    tools_api.reset()
    tools = [{"type": "function", "function": FUNCTION}]
    free = tools_api.chat(tools=tools)
    assert "x-baton-ignored" not in free.headers
    required = tools_api.chat(tools=tools, tool_choice="required")
    assert required.headers["x-baton-ignored"] == (
        "tools[0].function.parameters/properties/tags/uniqueItems"
    )
    strict = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    refused = tools_api.chat(tools=strict, tool_choice="required")
    assert refused.json()["error"]["param"] == "tools[0].function.parameters"
    tools_api.generator.wait_idle()


def test_true_is_a_schema_and_false_one_that_nothing_follows(api):
    for value, status in ((True, 200), (False, 400)):
        named = {"type": "json_schema", "json_schema": {"name": "any", "schema": value}}
        assert api.complete(response_format=named).status_code == status
        assert api.complete(structured_outputs={"json": value}).status_code == status


def test_the_reason_why_a_schema_fails_is_told_alone(api):
    response = api.complete(guided_json={"type": "integer", "minimum": 5, "maximum": 1})
    assert response.json()["error"]["message"] == (
        "'guided_json' cannot be compiled: Unsatisfiable schema: minimum (5) is greater than "
        "maximum (1)"
    )


def test_the_reason_why_a_pattern_fails_is_told(api):
    for regex, reason in (("(?!a)b", "look-around"), ("a(b", "unclosed group")):
        response = api.complete(structured_outputs={"regex": regex})
        assert response.status_code == 400
        assert reason in response.json()["error"]["message"]
    dropped = api.complete(guided_json={"type": "object", "patternProperties": {"(?!a)b": False}})
    assert dropped.status_code == 200
    assert dropped.headers["x-baton-ignored"] == "guided_json/patternProperties"
