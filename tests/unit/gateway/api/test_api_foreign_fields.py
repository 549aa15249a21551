"""Fields of other servers and of older APIs that Baton understands: nothing of them is ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.grammars.structural_tags import MAX_TAGS
from gateway.text.tokenizer import Tokenizer
from tests.unit.gateway.api_clients import CALL, SCHEMA
from tests.unit.gateway.api_harness import MODEL, LiveApi

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FUNCTION = {"name": "weather", "description": "The weather", "parameters": SCHEMA}
OTHER = {"name": "other", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def running_api(tools_checkpoint: Path, tools_tokenizer: Tokenizer) -> Iterator[LiveApi]:
    with LiveApi(tools_checkpoint, tools_tokenizer, max_context=4000) as live:
        yield live


def check_understood(response) -> None:
    assert response.status_code == 200, response.text
    assert "x-baton-ignored" not in response.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        (RESPONSES, {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
    ],
)
def test_every_api_takes_a_cache_salt(api, path, body):
    check_understood(api.post(path, {"model": MODEL, **body, "cache_salt": "s"}))
    [request] = api.generator.requests
    assert request.cache_salt.endswith("s")


def test_allowed_tools(api):
    named = {"type": "function", "function": {"name": "weather"}}
    tools = [{"type": "function", "function": each} for each in (FUNCTION, OTHER)]
    for mode in ("auto", "required"):
        chosen = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        check_understood(api.chat(tools=tools, tool_choice=chosen))
        request = api.generator.requests[-1]
        assert api.tokenizer.decode(request.token_ids, False).startswith("tools:weather <")
        assert (request.sampling.grammar is not None) == (mode == "required")
    missing = {"type": "function", "function": {"name": "no"}}
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [missing]}}
    assert "'no'" in api.chat(tools=tools, tool_choice=chosen).json()["error"]["message"]


def test_allowed_tools_of_responses(api):
    tools = [{"type": "function", **each} for each in (FUNCTION, OTHER)]
    chosen = {"type": "allowed_tools", "mode": "required"}
    chosen |= {"tools": [{"type": "function", "name": "other"}]}
    body = {"model": MODEL, "input": "x", "tools": tools, "tool_choice": chosen}
    check_understood(api.post(RESPONSES, body))
    [request] = api.generator.requests
    assert api.tokenizer.decode(request.token_ids, False).startswith("tools:other <")
    assert "other" in request.sampling.grammar


def test_legacy_functions_whole_and_streamed(api):
    api.says(CALL)
    fields = {"functions": [FUNCTION], "function_call": {"name": "weather"}}
    [choice] = api.chat(**fields).json()["choices"]
    call = choice["message"]["function_call"]
    assert (choice["finish_reason"], call["name"]) == ("function_call", "weather")
    assert json.loads(call["arguments"]) == {"city": "Köln", "days": 2}
    assert "tool_calls" not in choice["message"]
    lines = api.chat(**fields, stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"].get("function_call") or {} for chunk in chunks]
    assert "".join(each.get("name", "") for each in deltas) == "weather"
    arguments = "".join(each.get("arguments", "") for each in deltas)
    assert json.loads(arguments) == {"city": "Köln", "days": 2}
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


def test_legacy_functions_in_the_history(api):
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "rain"},
    ]
    body = {"model": MODEL, "messages": messages, "functions": [FUNCTION]}
    check_understood(api.post(CHAT, body))
    prompt = api.tokenizer.decode(api.generator.requests[0].token_ids, False)
    assert '<tool_call>{"name": "f", "arguments": {}}</tool_call>' in prompt
    assert "<|start|>tool\nrain(call00001)" in prompt


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_json_object": True}, {"json_object": True}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ],
)
def test_guided_fields_are_structured_outputs(api, older, newer):
    check_understood(api.complete(**older))
    check_understood(api.complete(structured_outputs=newer))
    first, second = (request.sampling.grammar for request in api.generator.requests)
    assert first == second


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"type": "thing"}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
    ],
)
def test_bad_guided_fields_are_named(api, fields, param):
    response = api.complete(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


TAGS = {
    "structures": [{"begin": "<f=weather>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
FORMAT = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [
        {
            "begin": "<f=weather>",
            "content": {"type": "json_schema", "json_schema": SCHEMA},
            "end": "</f>",
        }
    ],
}


def test_structural_tags(api):
    tag = {"type": "structural_tag", **TAGS}
    for fields in (
        {"response_format": tag},
        {"response_format": {"type": "structural_tag", "format": FORMAT}},
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
    ):
        check_understood(api.complete(**fields))
    first, *others = (request.sampling.grammar for request in api.generator.requests)
    assert others == [first, first]
    assert '"<f="' in first


@pytest.mark.parametrize(
    "tag",
    [
        {"structures": [], "triggers": ["a"]},
        {**TAGS, "triggers": ["<g"]},
        {**TAGS, "triggers": []},
        {"format": {"type": "sequence"}},
        {"structures": [{"begin": "<f=", "end": ""}], "triggers": ["<f="]},
        {"structures": TAGS["structures"] * (MAX_TAGS + 1), "triggers": TAGS["triggers"]},
    ],
)
def test_bad_structural_tags_are_refused(api, tag):
    response = api.complete(response_format={"type": "structural_tag", **tag})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
