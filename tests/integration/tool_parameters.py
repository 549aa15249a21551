"""What parameters change of an answer's form, and of the tools that it may call."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.integration.parameter_api import CHAT, QUESTION, Api
from tests.integration.shown_effects import Shown

SHOWN = Shown()
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
LONG = {"max_tokens": 400}
TOOLS: dict[str, Any] = {"tools": [WEATHER, TIME], "max_tokens": 200}


@SHOWN.by("response_format", "structured_outputs")
def structure(api: Api) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    strict = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    assert json.loads(api.message(response_format=strict, max_tokens=50)["content"])["a"] in (1, 2)
    loose = api.message(response_format={"type": "json_object"}, frequency_penalty=1, **LONG)
    assert isinstance(json.loads(loose["content"]), dict)
    assert api.message(response_format={"type": "text"}) == api.message()
    assert api.text(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert json.loads(api.text(structured_outputs={"json": schema}))["a"] in (1, 2)
    assert re.fullmatch("[ab]{3}7", api.text(structured_outputs={"regex": "[ab]{3}7"}))
    for grammar in ('start: "x" ("1" | "2")', 'root ::= "x" ("1" | "2")'):
        assert api.text(structured_outputs={"grammar": grammar}) in ("x1", "x2")
    loose_text = api.text(structured_outputs={"json_object": True}, frequency_penalty=1, **LONG)
    assert isinstance(json.loads(loose_text), dict)
    either = api.message(response_format=strict, **TOOLS)
    assert either.get("tool_calls") or json.loads(either["content"])["a"] in (1, 2)
    regex = {"regex": "[ab]{3}7"}
    assert api.refusal(CHAT, tools=[TIME], structured_outputs=regex) == "tool_choice"


@SHOWN.by("tools")
def tools(api: Api) -> None:
    assert api.prompt_tokens(tools=[WEATHER]) > api.prompt_tokens()
    assert api.message(tools=[WEATHER])["content"]
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": '{"city": "Rome", "days": 1}'}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    assert api.prompt_tokens(messages=messages) > api.prompt_tokens() + 20


def checked_call(message: dict[str, Any]) -> str:
    """Name of the only call of a message; its arguments follow the tool's schema."""
    assert message["content"] is None
    [call] = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "get_weather":
        assert arguments["city"] in ("Rome", "Oslo")
        assert arguments["days"] in (1, 2)
    return str(call["function"]["name"])


@SHOWN.by("tool_choice", "parallel_tool_calls")
def tool_choice(api: Api) -> None:
    one = {"parallel_tool_calls": False, **TOOLS}
    required = api.chat(tool_choice="required", **one)["choices"][0]
    assert checked_call(required["message"]) in ("get_weather", "get_time")
    assert required["finish_reason"] == "tool_calls"
    for name in ("get_weather", "get_time"):
        named = {"type": "function", "function": {"name": name}}
        whole = api.chat(tool_choice=named, **TOOLS)["choices"][0]["message"]
        if name == "get_weather":
            assert checked_call(whole) == name
            assert streamed_calls(api.stream(tool_choice=named, **TOOLS)) == [
                (call["function"]["name"], call["function"]["arguments"])
                for call in whole["tool_calls"]
            ]
    assert "tool_calls" not in api.message(tool_choice="none", **TOOLS)
    assert api.refusal(CHAT, tool_choice="required") == "tool_choice"


def streamed_calls(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for event in events:
        for call in event["choices"][0]["delta"].get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                names[call["index"]] = function["name"]
            arguments[call["index"]] = arguments.get(call["index"], "") + function["arguments"]
    return [(names[index], text) for index, text in arguments.items()]


@SHOWN.by("functions", "function_call")
def legacy_functions(api: Api) -> None:
    functions = [tool["function"] for tool in TOOLS["tools"]]
    named = {"functions": functions, "function_call": {"name": "get_weather"}, "max_tokens": 200}
    [whole] = api.chat(**named)["choices"]
    called = api.chat(
        tools=TOOLS["tools"],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        parallel_tool_calls=False,
        max_tokens=200,
    )["choices"][0]["message"]["tool_calls"][0]["function"]
    assert whole["message"]["function_call"] == called
    assert whole["finish_reason"] == "function_call"
    assert api.refusal(CHAT, function_call={"name": "get_weather"}) == "function_call"


@SHOWN.by(*(f"guided_{name}" for name in ("json", "json_object", "regex", "choice", "grammar")))
def older_constraints(api: Api) -> None:
    for name, value in {
        "json": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
        "json_object": True,
        "regex": "[ab]+c",
        "choice": ["yes", "no"],
        "grammar": 'start: "x"+ "y"',
    }.items():
        older = api.text(**{f"guided_{name}": value})
        assert older == api.text(structured_outputs={name: value})
        assert older != api.text()


@SHOWN.by("format", "json_schema", "regex", "grammar", "ebnf", "structural_tag")
def other_servers_constraints(api: Api) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tag = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f"]}
    source = 'root ::= "x"+ "y"'
    for theirs, part, value in (
        ("format", "json", schema),
        ("json_schema", "json", schema),
        ("regex", "regex", "[ab]+c"),
        ("grammar", "grammar", source),
        ("ebnf", "grammar", source),
        ("structural_tag", "structural_tag", tag),
    ):
        assert api.text(**{theirs: value}) == api.text(structured_outputs={part: value})
