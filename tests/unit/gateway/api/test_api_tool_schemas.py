"""Schemas of tools, which are enforced as far as they can be: what is said of them names the field
of the client's own tool. A call has the arguments that its schema lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as HfTokenizer

from tests.unit.gateway.api_harness import MODEL, LiveApi

HI = {"role": "user", "content": "Hi"}
LAX = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
PATTERN = {"type": "object", "patternProperties": {"(?!a)b": False}}
IMPOSSIBLE = {"type": "thing"}
FIRST = {"name": "first", "parameters": {"type": "object"}}
NUMBER = {"properties": {"a": {"type": "integer"}}}
OPEN = {"additionalProperties": {"type": "boolean"}}
NAMED = {"patternProperties": {"^x-": {"type": "boolean"}}}
BASE = {"allOf": [{"properties": {"b": {"type": "boolean"}}}]}


def bodies(schema: dict[str, Any] | None, strict: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """For the field that holds the schema in each API, a path and a request that calls tools."""
    function = {"name": "f", "parameters": schema, "strict": strict}
    web = {"type": "web_search"}
    return {
        "tools[1].function.parameters": (
            "/v1/chat/completions",
            {
                "messages": [HI],
                "tools": [web, {"type": "function", "function": function}],
                "tool_choice": "required",
            },
        ),
        "functions[1].parameters": (
            "/v1/chat/completions",
            {"messages": [HI], "functions": [FIRST, function], "function_call": {"name": "f"}},
        ),
        "tools[1].parameters": (
            "/v1/responses",
            {
                "input": "Hi",
                "tools": [web, {"type": "function", **function}],
                "tool_choice": "required",
            },
        ),
        "tools[1].input_schema": (
            "/v1/messages",
            {
                "max_tokens": 20,
                "messages": [HI],
                "tools": [
                    {"type": "web_search_20250305", "name": "web_search"},
                    {"name": "f", "input_schema": schema, "strict": strict},
                ],
                "tool_choice": {"type": "any"},
            },
        ),
    }


FIELDS = list(bodies(LAX, strict=False))


@pytest.fixture(scope="module")
def running_api(tools_api: LiveApi) -> LiveApi:
    return tools_api


def post(api: LiveApi, field: str, schema: dict[str, Any] | None, strict: bool = False) -> Any:
    path, body = bodies(schema, strict)[field]
    return api.post(path, {"model": MODEL, **body})


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("schema", "dropped"), [(LAX, "/properties/a/uniqueItems"), (PATTERN, "/patternProperties")]
)
def test_what_is_dropped_of_a_schema_is_named_by_the_clients_field(api, field, schema, dropped):
    answer = post(api, field, schema)
    assert answer.status_code == 200, answer.text
    assert f"{field}{dropped}" in answer.headers["x-baton-ignored"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("schema", "strict"), [(LAX, True), (PATTERN, True), (IMPOSSIBLE, False), (IMPOSSIBLE, True)]
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_the_clients_field(
    api, field, schema, strict
):
    answer = post(api, field, schema, strict)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"'{field}'")


class Calls:
    """Reads the grammar of the last request."""

    def __init__(self, checkpoint: Path, api: LiveApi) -> None:
        path = str(checkpoint / "tokenizer.json")
        self._tokenizer, self._guide = HfTokenizer.from_file(path), LLTokenizer(path, slices=[])
        self._api = api

    def allow(self, arguments: dict[str, Any]) -> bool:
        """Whether the call may have these arguments."""
        call = json.dumps({"name": "f", "arguments": arguments}, separators=(",", ":"))
        ids = self._tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>").ids
        grammar = self._api.generator.requests[-1].sampling.grammar
        matcher = LLMatcher(self._guide, grammar)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture
def calls(tools_checkpoint: Path, api: LiveApi) -> Calls:
    return Calls(tools_checkpoint, api)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "properties": {}}, [{}], [{"b": True}]),
        ({"type": "object", **NUMBER}, [{}, {"a": 1}], [{"a": 1, "b": True}, {"b": True}]),
        ({**NUMBER, "required": ["b"]}, [{"a": 1, "b": True}], [{"a": 1}, {"b": 1, "c": 1}]),
        ({"type": "object"}, [{}, {"b": True}], []),
        ({**NUMBER, **OPEN}, [{"a": 1, "b": True}], [{"b": 1}]),
        ({**NUMBER, **NAMED}, [{"a": 1, "x-b": True}], [{"x-b": 1}]),
        ({**NUMBER, **BASE}, [{"a": 1, "b": True}], [{"a": 1, "b": 1}]),
        ({**NUMBER, "propertyNames": {"minLength": 1}}, [{"a": 1, "b": True}], [{"a": True}]),
    ],
)
def test_a_call_has_the_arguments_that_its_schema_speaks_of(api, calls, field, schema, good, bad):
    assert post(api, field, schema).status_code == 200
    assert [calls.allow(each) for each in good] == [True] * len(good)
    assert [calls.allow(each) for each in bad] == [False] * len(bad)


@pytest.mark.parametrize("field", [field for field in FIELDS if "input_schema" not in field])
@pytest.mark.parametrize("schema", [None, {}])
def test_a_function_without_a_schema_has_no_arguments(api, calls, field, schema):
    assert post(api, field, schema).status_code == 200
    assert calls.allow({})
    assert not calls.allow({"b": True})
