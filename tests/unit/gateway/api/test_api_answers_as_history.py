"""Whatever a model wrote, and wherever it was cut off: the answer is accepted in the next request,
by every API, and the template sees the arguments as an object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.api.context import ApiLimits
from gateway.text.tokenizer import Tokenizer
from protocol.messages import FinishReason
from tests.effort import times
from tests.unit.gateway.api_harness import MODEL, LiveApi, events_of
from tests.unit.gateway.chat.families import FAMILIES, PARAMETERS, written

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
ASK = [{"role": "user", "content": "Say it"}]
NAMES = ("weather", "now")
FUNCTIONS = [{"name": name, "parameters": PARAMETERS} for name in NAMES]
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": each} for each in FUNCTIONS],
    "responses": [{"type": "function", **each} for each in FUNCTIONS],
    "messages": [{"name": name, "input_schema": PARAMETERS} for name in NAMES],
}
ODD = ['"', "}", "]", ",", "True", "'", "\n", "\\", "\\ud83d", "city: Bern", "</think>", "x", "é"]
ODD += ["{", "<think>", "</tool_call>", '{"name": "weather"', "\x00", "1e999", "NaN", "(", "="]
CALLS = [
    [("weather", {"city": "Köln", "days": 2})],
    [("now", {}), ("weather", {"more": {"a": [True, None, "x"]}})],
]


@pytest.fixture(scope="module", params=FAMILIES)
def family_api(
    request: pytest.FixtureRequest, tools_checkpoint: Path, tools_tokenizer: Tokenizer
) -> Iterator[tuple[str, LiveApi]]:
    with LiveApi(
        tools_checkpoint, tools_tokenizer, max_context=4000, tool_parser=request.param
    ) as live:
        yield request.param, live
        live.generator.wait_idle()


def ask(api: LiveApi, kind: str, turns: list[Any], stream: bool = False) -> Any:
    """The answer to the turns; a failure shows it."""
    paths = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
    field = "input" if kind == "responses" else "messages"
    limit = {"messages": {"max_tokens": 150}}.get(kind, {})
    body = {"model": MODEL, field: turns, "tools": TOOLS[kind], "stream": stream, **limit}
    response = api.post(f"/v1/{paths[kind]}", body)
    assert response.status_code == 200, response.text
    return response


def chat_turns(answer: Any) -> list[Any]:
    message = answer.json()["choices"][0]["message"]
    calls = message.get("tool_calls", [])
    return [message, *({"role": "tool", "tool_call_id": c["id"], "content": ""} for c in calls)]


def response_items(answer: Any) -> list[Any]:
    items = answer.json()["output"]
    calls = [each for each in items if each["type"] == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": each["call_id"], "output": ""} for each in calls
    ]
    return [*items, *outputs]


def message_turns(answer: Any) -> list[Any]:
    blocks = answer.json()["content"]
    results = [
        {"type": "tool_result", "tool_use_id": each["id"], "content": ""}
        for each in blocks
        if each["type"] == "tool_use"
    ]
    results.append({"type": "text", "text": "Go on"})
    return [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


def named_events(answer: Any) -> list[Any]:
    """The data of a stream of /v1/responses or /v1/messages."""
    lines = answer.text.split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def items_of_chat(turns: list[Any]) -> list[Any]:
    """A chat's answer as the items that a client of /v1/responses makes of it."""
    message, *results = turns
    text = {"role": "assistant", "content": message["content"] or ""}
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]}
        for call in message.get("tool_calls", [])
    ]
    outputs = [
        {"type": "function_call_output", "call_id": each["tool_call_id"], "output": ""}
        for each in results
    ]
    return [text, *calls, *outputs]


@given(
    calls=st.sampled_from(CALLS),
    before=st.sampled_from(["", "I ask.", "<think>So.</think>", "<think>So. "]),
    odd=st.lists(st.tuples(st.integers(0, 200), st.sampled_from(ODD)), max_size=3),
    cut=st.one_of(st.none(), st.integers(1, 200)),
    finish=st.sampled_from([STOP, LENGTH]),
)
@example(CALLS[0], "", [], 1, LENGTH)
@settings(
    max_examples=times(12, 400),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_answer_is_accepted_as_history(
    family_api: tuple[str, LiveApi],
    calls: list[Any],
    before: str,
    odd: list[tuple[int, str]],
    cut: int | None,
    finish: FinishReason,
) -> None:
    family, api = family_api
    text = before + written(family, calls)
    for place, piece in odd:
        text = text[:place] + piece + text[place:]
    api.says(text[:cut], finish)
    chat = chat_turns(ask(api, "chat", ASK))
    response = response_items(ask(api, "responses", ASK))
    message = message_turns(ask(api, "messages", ASK))
    api.says("Good")
    for kind, turns in (
        ("chat", [*chat, *ASK]),
        ("responses", [*response, *ASK]),
        ("responses", [*items_of_chat(chat), *ASK]),
        ("messages", message),
    ):
        assert "Good" in ask(api, kind, [*ASK, *turns]).text


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"hot": True}', '{"hot": true}'),
        ("{city: Bern}", '{"city": "Bern"}'),
        ('{"city": "a\nb"}', '{"city": "a\\nb"}'),
        ('{"city": "Be', '{"city": "Be"}'),
        ('{"city": "\\ud83d"}', '{"city": "\ufffd"}'),
        ("print(1)", '{"arguments": "print(1)"}'),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "responses", "tokenize"])
def test_the_template_sees_an_object(
    tools_api: LiveApi, kind: str, arguments: str, seen: str
) -> None:
    tools_api.reset()
    function = {"name": "weather", "arguments": arguments}
    message = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    if kind == "tokenize":
        answer = tools_api.post("/tokenize", {"messages": [*ASK, message]})
        assert answer.status_code == 200
        prompt = tools_api.tokenizer.decode(answer.json()["tokens"], False)
    else:
        item = {"type": "function_call", "call_id": "c", **function}
        ask(tools_api, kind, [*ASK, message if kind == "chat" else item])
        prompt = tools_api.tokenizer.decode(tools_api.generator.requests[-1].token_ids, False)
    assert f'<tool_call>{{"name": "weather", "arguments": {seen}}}</tool_call>' in prompt


@pytest.mark.parametrize("depth", [500, 2000, 20_000])
@pytest.mark.parametrize("kind", ["chat", "responses", "tokenize"])
def test_arguments_that_nest_too_deeply_are_the_caller_s_fault(
    tools_api: LiveApi, kind: str, depth: int
) -> None:
    function = {"name": "weather", "arguments": '{"a":' + "[" * depth + "]" * depth + "}"}
    message = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    body: dict[str, Any] = {"model": MODEL, "messages": [*ASK, message]}
    if kind == "responses":
        body = {"model": MODEL, "input": [{"type": "function_call", "call_id": "c", **function}]}
    path = {"chat": "/v1/chat/completions", "responses": "/v1/responses"}.get(kind, "/tokenize")
    answer = tools_api.post(path, body)
    assert answer.status_code == 400, answer.text
    assert "nests deeper than 200" in answer.json()["error"]["message"]


@pytest.mark.parametrize("num_calls", [1, 8])
def test_values_inside_of_strings_have_the_bounds_of_a_body(
    tools_checkpoint: Path, tools_tokenizer: Tokenizer, num_calls: int
) -> None:
    """The strings of the body are few; what they hold takes much memory once it is decoded."""
    function = {"name": "weather", "arguments": '{"a":[' + "[]," * 40_000 * (9 - num_calls) + "0]}"}
    message = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}] * num_calls}
    limits = ApiLimits(max_body_bytes=4 << 20)
    with LiveApi(tools_checkpoint, tools_tokenizer, limits) as live:
        answer = live.post("/tokenize", {"messages": [*ASK, message]})
        assert answer.status_code == 400
        assert "the limit is" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("schema", "status"),
    [('{"const": "\\ud83d"}', 200), ('{"a":' + "[" * 2000 + "]" * 2000 + "}", 400)],
)
def test_a_schema_in_a_string_is_checked_as_one_in_the_body(
    tools_api: LiveApi, schema: str, status: int
) -> None:
    tools_api.reset()
    answer = tools_api.chat(structured_outputs={"json": schema})
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("arguments", "completed"),
    [('{"city": "Be', {"city": "Be"}), ('{"city": "B", "c', {"city": "B"}), ('{"days": 1', {})],
)
def test_an_incomplete_call_is_marked(
    tools_api: LiveApi, arguments: str, completed: object
) -> None:
    """Its arguments are no JSON, and no field says that it is to be run."""
    tools_api.reset()
    tools_api.says(f'<tool_call>{{"name": "weather", "arguments": {arguments}', LENGTH)
    choice = ask(tools_api, "chat", ASK).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments.rstrip("1")
    assert choice["finish_reason"] == "length"
    response = ask(tools_api, "responses", ASK).json()
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["arguments"] == arguments.rstrip("1")
    message = ask(tools_api, "messages", ASK).json()
    assert message["content"][0]["input"] == completed
    assert message["stop_reason"] == "max_tokens"


FINE = '<tool_call>{"name": "weather", "arguments": {"city": "B"}}</tool_call>'
BROKEN = '<tool_call>{"name": "weather", "arguments": {"city" "B"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (BROKEN, BROKEN, 0),
        (f"{BROKEN}\n{FINE}", BROKEN, 1),
        (f"Now:\n{FINE}\nand\nmore.", "Now:\nand\nmore.", 1),
        (f"You write:\n```\n{FINE}\n```\nThen wait.", None, 0),
        (f"```json\n{FINE}\n```", "", 1),
    ],
)
def test_every_api_says_the_same_in_a_stream_and_whole(
    tools_api: LiveApi, text: str, content: str | None, num_calls: int
) -> None:
    tools_api.reset()
    tools_api.says(text, STOP)
    expected = (text if content is None else content, num_calls)
    choice = ask(tools_api, "chat", ASK).json()["choices"][0]
    calls = choice["message"].get("tool_calls", [])
    assert (choice["message"]["content"] or "", len(calls)) == expected
    assert choice["finish_reason"] == ("tool_calls" if num_calls else "stop")
    chunks: list[Any] = events_of(ask(tools_api, "chat", ASK, stream=True).text)
    deltas = [each["choices"][0]["delta"] for each in chunks if each["choices"]]
    told = "".join(each.get("content") or "" for each in deltas)
    begun = {call["index"] for each in deltas for call in each.get("tool_calls", ())}
    assert (told, len(begun)) == expected
    items = ask(tools_api, "responses", ASK).json()["output"]
    texts = [each["content"][0]["text"] for each in items if each["type"] == "message"]
    assert ("".join(texts), len(items) - len(texts)) == expected
    streamed = named_events(ask(tools_api, "responses", ASK, stream=True))[-1]["response"]["output"]
    assert [each["type"] for each in streamed] == [each["type"] for each in items]
    blocks = ask(tools_api, "messages", ASK).json()["content"]
    texts = [each["text"] for each in blocks if each["type"] == "text"]
    assert ("".join(texts), len(blocks) - len(texts)) == expected
    events = named_events(ask(tools_api, "messages", ASK, stream=True))
    starts = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    assert [each["type"] for each in starts] == [each["type"] for each in blocks]
    pieces = [each["delta"].get("text", "") for each in events if "delta" in each]
    assert "".join(pieces) == expected[0]


def test_a_call_that_is_cut_off_before_its_name_is_nothing(tools_api: LiveApi) -> None:
    tools_api.reset()
    tools_api.says('<tool_call>\n{"name"', LENGTH)
    choice = ask(tools_api, "chat", ASK).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert ask(tools_api, "responses", ASK).json()["output"] == []
    assert ask(tools_api, "messages", ASK).json()["content"] == []
    chunks = events_of(ask(tools_api, "chat", ASK, stream=True).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]  # type: ignore[index]
    assert "".join(delta.get("content", "") for delta in deltas) == ""
