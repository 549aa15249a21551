"""Structured output over HTTP: what is asked for becomes the workers' grammar, or a named error."""

from __future__ import annotations

import json

import pytest

from router.text.grammar import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "thing", "schema": SCHEMA, "strict": True, "description": "a thing"}
WISHES = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, json_object_grammar()),
    (
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        json_schema_grammar(SCHEMA),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
        json_object_grammar(),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, json_schema_grammar(SCHEMA)),
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
ERRORS = [
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "schema": {"if": 1}}}},
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
