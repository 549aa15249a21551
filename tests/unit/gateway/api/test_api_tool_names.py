"""Tools with names as long as Anthropic allows: clients make them of servers' and tools' names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.text.tokenizer import Tokenizer
from tests.unit.gateway.api_clients import SCHEMA
from tests.unit.gateway.api_harness import MODEL, LiveApi

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, RESPONSES, MESSAGES)
LONGEST = "mcp__" + "x" * 123
HI = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def running_api(tools_checkpoint: Path, tools_tokenizer: Tokenizer) -> Iterator[LiveApi]:
    with LiveApi(tools_checkpoint, tools_tokenizer, max_context=4000) as live:
        yield live


def body_of(path: str, name: str) -> dict[str, Any]:
    """A request whose one tool was called before, and must be called again."""
    function = {"name": name, "parameters": SCHEMA}
    if path == CHAT:
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
        return {
            "messages": [
                HI,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "1"},
            ],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": name}},
        }
    if path == RESPONSES:
        return {
            "input": [
                HI,
                {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "tools": [{"type": "function", **function}],
            "tool_choice": {"type": "function", "name": name},
        }
    return {
        "max_tokens": 300,
        "messages": [
            HI,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": name, "input": {}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
        ],
        "tools": [{"name": name, "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": name},
    }


@pytest.mark.parametrize("path", PATHS)
def test_a_tool_of_the_longest_name_is_called(api, path):
    call = {"name": LONGEST, "arguments": {}}
    api.says(f"<tool_call>{json.dumps(call)}</tool_call>")
    answer = api.post(path, {"model": MODEL, **body_of(path, LONGEST)})
    assert answer.status_code == 200, answer.text
    assert json.dumps(LONGEST) in json.dumps(answer.json())
    [request] = api.generator.requests
    assert api.tokenizer.decode(request.token_ids, False).count(LONGEST) == 2
    assert LONGEST in request.sampling.grammar


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [f"{LONGEST}x", "", "a b"])
def test_a_name_that_is_too_long_or_no_name_is_refused_by_its_place(api, path, name):
    answer = api.post(path, {"model": MODEL, **body_of(path, name)})
    assert answer.status_code == 400
    field = "tools[0].function.name" if path == CHAT else "tools[0].name"
    assert f"'{field}'" in answer.json()["error"]["message"]
