"""Schemas of tools, which are enforced as far as they can be: what is said of them names the field
of the client's own tool."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.api_harness import MODEL, LiveApi

HI = {"role": "user", "content": "Hi"}
LAX = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
PATTERN = {"type": "object", "patternProperties": {"(?!a)b": False}}
IMPOSSIBLE = {"type": "thing"}
FIRST = {"name": "first", "parameters": {"type": "object"}}


def bodies(schema: dict[str, Any], strict: bool) -> dict[str, tuple[str, dict[str, Any]]]:
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


def post(api: LiveApi, field: str, schema: dict[str, Any], strict: bool = False) -> Any:
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
