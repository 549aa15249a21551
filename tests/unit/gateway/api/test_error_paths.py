"""Errors name the place in the body that the client sent, and no branch of a type of ours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from pydantic_core import CoreSchema

from gateway.api.anthropic.request import CountTokensRequest, MessagesRequest
from gateway.api.body_reader import RequestBody, fields_of
from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai.completion_request import CompletionRequest
from gateway.api.openai_responses.request import InputTokensRequest, ResponsesRequest
from gateway.api.tokenize import DetokenizeRequest, TokenizeRequest
from protocol.errors import InvalidRequest
from tests.effort import NIGHTLY

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CACHED = {"type": "ephemeral", "ttl": "5m"}
TEXT = {"type": "text", "text": "Hi", "cache_control": CACHED}
PART = {"type": "input_text", "text": "Hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"name": "weather", "description": "The weather", "parameters": SCHEMA}
MESSAGES = [
    {"role": "system", "content": [TEXT]},
    {"role": "user", "content": "Hi", "name": "n"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}], "tool_calls": [CALL]},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": [TEXT]},
]
DOCUMENT = {"type": "document", "title": "T", "source": {"type": "text", "data": "x"}}
BODIES: list[tuple[type[RequestBody], dict[str, Any]]] = [
    (
        ChatRequest,
        {
            "model": "m",
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "stop": ["a"],
            "logit_bias": {"1": 1.0},
            "metadata": {"a": "b"},
            "stream": True,
            "stream_options": {"include_usage": True},
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
            },
        },
    ),
    (
        ChatRequest,
        {
            "model": "m",
            "messages": MESSAGES[:2],
            "functions": [FUNCTION],
            "function_call": {"name": "weather"},
            "structured_outputs": {"json": SCHEMA},
            "guided_json": SCHEMA,
            "response_format": {"type": "structural_tag", "structures": [{}], "triggers": ["a"]},
        },
    ),
    (CompletionRequest, {"model": "m", "prompt": [[1, 2], [3]], "stop": "a"}),
    (CompletionRequest, {"model": "m", "prompt": ["a", "b"], "logit_bias": {"1": 1}}),
    (
        ResponsesRequest,
        {
            "model": "m",
            "input": [
                {"type": "message", "role": "user", "content": [PART]},
                {"role": "assistant", "content": "Hi"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [PART]},
                {"type": "custom_tool_call", "call_id": "d", "name": "f", "input": "x"},
                {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
                {"type": "shell_call", "call_id": "e", "action": {"commands": ["ls"]}},
                {"type": "shell_call_output", "call_id": "e", "output": [{"stdout": "x"}]},
                {"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "output": "x"},
                {
                    "type": "reasoning",
                    "id": "r",
                    "summary": [{"type": "summary_text", "text": "x"}],
                },
                {"type": "item_reference", "id": "msg_1"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "weather"}],
            },
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
        },
    ),
    (InputTokensRequest, {"input": "Hi", "text": {"format": {"type": "text"}}}),
    (
        MessagesRequest,
        {
            "model": "m",
            "max_tokens": 20,
            "system": [TEXT],
            "messages": [
                {"role": "user", "content": [TEXT, DOCUMENT]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "x", "signature": "s"},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                        {"type": "server_tool_use", "id": "d", "name": "f", "input": {}},
                        {"type": "web_search_tool_result", "tool_use_id": "d", "content": []},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [
                                TEXT,
                                {
                                    "type": "search_result",
                                    "source": "s",
                                    "title": "t",
                                    "content": [TEXT],
                                },
                                {"type": "tool_reference", "tool_name": "f"},
                                {**DOCUMENT, "source": {"type": "content", "content": [TEXT]}},
                            ],
                        }
                    ],
                },
            ],
            "tools": [{"name": "weather", "input_schema": SCHEMA, "cache_control": CACHED}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 2000},
            "metadata": {"user_id": "u"},
            "stop_sequences": ["a"],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    (CountTokensRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    (TokenizeRequest, {"messages": MESSAGES}),
    (DetokenizeRequest, {"tokens": [1, 2]}),
]
WRONG: list[Any] = [1, 1.5, "x", True, [], {}, [1], ["x"], [[]], [{}], {"a": 1}, {"type": "image"}]
WRONG += [{"type": 1}, {"type": "text"}, "x" * 70_000, {"x" * 300: 1}]
GONE = object()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, (dict, list)):
            yield from places(each, (*path, key))


def with_value(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The body with another value at a place, or without it."""
    changed = deepcopy(body)
    at: Any = changed
    for key in path[:-1]:
        at = at[key]
    if value is GONE:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return changed


def error_of(schema: type[RequestBody], body: Any) -> InvalidRequest | None:
    try:
        fields_of(schema, json.dumps(body).encode(), False)
    except InvalidRequest as error:
        return error
    return None


def check_path(body: dict[str, Any], param: str) -> None:
    """Every step of the path is in the body; the last one may be missing in an object."""
    steps = re.findall(r"\[(\d+)\]|([^.\[\]]+)", param)
    assert steps, param
    at: Any = body
    for number, (index, name) in enumerate(steps):
        is_last = number == len(steps) - 1
        if index:
            assert isinstance(at, list), (param, at)
            at = at[int(index)]
        else:
            assert isinstance(at, dict), (param, at)
            assert is_last or name in at, (param, at)
            at = at.get(name)


@pytest.mark.parametrize(("schema", "body"), BODIES)
def test_a_body_without_mistakes_is_accepted(schema, body):
    assert error_of(schema, body) is None


@pytest.mark.parametrize(("schema", "body"), BODIES)
def test_an_error_names_a_place_in_the_clients_own_body(schema, body):
    num_errors = 0
    for number, path in enumerate(places(body)):
        for value in (GONE, *(WRONG if NIGHTLY else WRONG[number % 3 :: 3])):
            changed = with_value(body, path, value)
            error = error_of(schema, changed)
            if error is not None:
                num_errors += 1
                assert error.param is not None, error.message
                check_path(changed, error.param)
                assert f"'{error.param}'" in error.message
    assert num_errors >= 5


def branches(schema: Any) -> Iterator[tuple[str, list[str]]]:
    """The unions in a model's schema, with the names of their branches."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        if kind == "union":
            yield "untold", []
        elif kind == "tagged-union":
            yield "told", list(schema["choices"])
        for key, each in schema.items():
            if key not in ("serialization", "metadata"):
                yield from branches(each)
    elif isinstance(schema, (list, tuple)):
        for each in schema:
            yield from branches(each)


@pytest.mark.parametrize("schema", list(dict(BODIES)), ids=lambda each: each.__name__)
def test_names_of_branches_can_be_told_from_fields(schema):
    core: CoreSchema = schema.__pydantic_core_schema__
    for kind, names in branches(core):
        assert kind == "told", "a union without a discriminator names its branches after types"
        assert all(each.startswith("<") and each.endswith(">") for each in names)


def said_by(role: str, block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


@pytest.mark.parametrize(
    ("schema", "fields", "param", "said"),
    [
        (
            MessagesRequest,
            {"system": [{**TEXT, "cache_control": {"type": "ephemeral", "ttl": "1d"}}]},
            "system[0].cache_control.ttl",
            "'5m' or '1h'",
        ),
        (MessagesRequest, {"system": 1}, "system", "a string or a list"),
        (
            MessagesRequest,
            said_by("user", {"type": "text", "text": 1}),
            "messages[0].content[0].text",
            "string",
        ),
        (
            MessagesRequest,
            said_by("assistant", {"type": "tool_use", "id": "c", "name": "f", "input": "x"}),
            "messages[0].content[0].input",
            "an object",
        ),
        (
            MessagesRequest,
            said_by(
                "user", {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text"}]}
            ),
            "messages[0].content[0].content[0].text",
            "is required",
        ),
        (
            ChatRequest,
            said_by("user", {"type": "image_url", "image_url": {}}),
            "messages[0].content[0].type",
            "'image_url' is not supported",
        ),
        (ChatRequest, {"guided_json": 1}, "guided_json", "an object or a boolean or a string"),
        (ChatRequest, {"metadata": {"a" * 65: "b"}}, f"metadata.{'a' * 65}", "at most 64"),
        (
            ResponsesRequest,
            {"input": [{"role": "user", "content": 5}]},
            "input[0].content",
            "a string or a list",
        ),
        (
            ResponsesRequest,
            {"text": {"format": {"type": "json_schema", "name": 1}}},
            "text.format.name",
            "string",
        ),
    ],
)
def test_the_right_branch_is_named(schema, fields, param, said):
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    if schema is ResponsesRequest:
        body = {"model": "m", "input": "x"}
    error = error_of(schema, body | fields)
    assert error is not None
    assert (error.param, said in error.message) == (param, True), error.message
