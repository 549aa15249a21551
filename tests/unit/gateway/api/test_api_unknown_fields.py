"""Fields that Baton does not know or honour are ignored and named; slips of the pen are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.api.context import ApiLimits
from gateway.api.openai.chat_request import ChatRequest
from gateway.api.unknown_fields.ignored import MAX_CHECKED, MAX_NAMES, take_ignored
from gateway.api.unknown_fields.misspellings import KNOWN_ELSEWHERE, meant_field
from gateway.http.request_scope import MAX_IGNORED_BYTES, ignored_header
from gateway.text.tokenizer import Tokenizer
from tests.unit.gateway.api_clients import SCHEMA
from tests.unit.gateway.api_harness import MODEL, LiveApi

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FUNCTION = {"name": "weather", "description": "The weather", "parameters": SCHEMA}
TEXT = [{"type": "text", "text": "Hi"}]
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": TEXT}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
PLAIN: dict[str, dict[str, object]] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": TEXT},
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "stream_options": {"include_usage": True},
        "stream": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
    COMPLETIONS: {"prompt": "Hi", "stream": True, "stream_options": {"include_usage": True}},
    RESPONSES: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    },
    MESSAGES: {
        "max_tokens": 20,
        "system": TEXT,
        "messages": [
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [RESULT]},
        ],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "metadata": {"user_id": "u"},
    },
}  # fmt: skip
FREE = {"parameters", "schema", "input_schema", "input_of_call", "response_format", "format"}
"""Fields that hold what the client likes, and those in which an unknown field is refused."""


@pytest.fixture(scope="module")
def running_api(tools_checkpoint: Path, tools_tokenizer: Tokenizer) -> Iterator[LiveApi]:
    with LiveApi(tools_checkpoint, tools_tokenizer, max_context=4000) as live:
        yield live


@pytest.fixture(scope="module")
def strict_api(tools_checkpoint: Path, tools_tokenizer: Tokenizer) -> Iterator[LiveApi]:
    with LiveApi(tools_checkpoint, tools_tokenizer, ApiLimits(refuse_unknown=True)) as live:
        yield live


def ignored(response) -> list[str]:
    assert response.status_code == 200, response.text
    return [name for name in response.headers.get("x-baton-ignored", "").split(", ") if name]


def prompts(api: LiveApi) -> list[list[int]]:
    return [request.token_ids for request in api.generator.requests]


def with_unknown(value: object, path: str = "", key: str = "") -> tuple[object, set[str]]:
    """The body with an unknown field in every object, and the names of these fields."""
    if isinstance(value, list):
        made = [with_unknown(each, f"{path}[]", key) for each in value]
        return [each for each, _ in made], set().union(*(names for _, names in made))
    if not isinstance(value, dict) or key in FREE or (key == "input" and not value):
        return value, set()
    whole: dict[str, object] = {}
    names = {f"{path}.zzz".removeprefix(".")}
    for name, each in value.items():
        whole[name], more = with_unknown(each, f"{path}.{name}".removeprefix("."), name)
        names |= more
    return {**whole, "zzz": {"a": [1]}}, names


@pytest.mark.parametrize("path", PLAIN)
def test_an_unknown_field_in_any_object_is_ignored_and_named(api, path):
    assert ignored(api.post(path, {"model": MODEL, **PLAIN[path]})) == []
    body, names = with_unknown({"model": MODEL, **PLAIN[path]})
    before = api.metric("baton_ignored_fields_total")
    assert set(ignored(api.post(path, body))) == names
    assert len(names) >= 2
    assert api.metric("baton_ignored_fields_total") == before + len(names)
    first, second = prompts(api)
    assert first == second


@pytest.mark.parametrize("path", PLAIN)
def test_an_unknown_field_is_refused_if_the_operator_says_so(strict_api, path):
    strict_api.reset()
    body = {"model": MODEL, **PLAIN[path]}
    assert strict_api.post(path, body).status_code == 200
    assert strict_api.post(path, {**body, "zzz": None}).status_code == 200
    response = strict_api.post(path, {**body, "zzz": 1})
    assert response.status_code == 400
    assert "'zzz' is not a known field" in response.text
    strict_api.generator.wait_idle()


def test_variables_that_the_template_does_not_read_are_ignored_and_named(api):
    read, unread = {"enable_thinking": False}, {"mood": "glad", "thinking": True}
    names = ["chat_template_kwargs.mood", "chat_template_kwargs.thinking"]
    for path in ("/tokenize", CHAT):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        answers = []
        for given in (read, {**unread, **read}):
            answers.append(api.post(path, {**body, "chat_template_kwargs": given}))
        assert [ignored(each) for each in answers] == [[], names]
    first, second = prompts(api)
    assert first == second
    assert answers[0].json()["usage"] == answers[1].json()["usage"]
    slip = api.chat(chat_template_kwargs={"enable_thinkin": False})
    assert slip.status_code == 400
    assert "did you mean 'enable_thinking'?" in slip.json()["error"]["message"]
    assert slip.json()["error"]["param"] == "chat_template_kwargs"


def test_a_limited_number_of_unread_variables_is_compared_and_named(api):
    given = {f"x{place}": 1 for place in range(MAX_NAMES)}
    before = api.metric("baton_ignored_fields_total")
    response = api.chat(chat_template_kwargs={**given, "enable_thinkin": 1})
    assert ignored(response)[0] == "chat_template_kwargs.x0"
    assert api.metric("baton_ignored_fields_total") == before + MAX_NAMES


def test_what_is_not_honoured_is_refused_if_the_operator_says_so(strict_api):
    strict_api.reset()
    for fields, param in (
        ({"store": True}, "store"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"verbosity": "low"}, "verbosity"),
        ({"chat_template_kwargs": {"mood": "glad"}}, "chat_template_kwargs.mood"),
    ):
        response = strict_api.chat(**fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "meant"),
    [
        (CHAT, {"max_token": 5}, "max_tokens"),
        (CHAT, {"temprature": 1}, "temperature"),
        (CHAT, {"tool_choise": "auto"}, "tool_choice"),
        (CHAT, {"message": []}, "messages"),
        (CHAT, {"seeds": 1}, "seed"),
        (CHAT, {"stream": True, "stream_options": {"include_usages": True}}, "include_usage"),
        (COMPLETIONS, {"top_q": 1}, "top_p"),
        (RESPONSES, {"instruction": "x"}, "instructions"),
        (RESPONSES, {"reasoning": {"efort": "low"}}, "effort"),
        (MESSAGES, {"max_tokenz": 1}, "max_tokens"),
        (MESSAGES, {"messages": [{"role": "user", "content": "x", "contents": "y"}]}, "content"),
    ],
)
def test_a_slip_is_refused_and_the_name_that_was_meant_is_told(api, path, fields, meant):
    response = api.post(path, {"model": MODEL, **PLAIN[path], **fields})
    assert response.status_code == 400
    assert f"did you mean '{meant}'?" in response.text


@pytest.mark.parametrize("name", ["m", "nn", "xyz", "top_a", "models", "min_keep", "x" * 5000])
def test_what_another_server_knows_or_is_far_from_all_names_is_no_slip(api, name):
    assert ignored(api.complete(**{name: 1})) == [name[:100]]


def test_slips_are_counted_in_edits():
    assert meant_field("max_tokns", ["max_tokens"]) == "max_tokens"
    assert meant_field("mx_tokns", ["max_tokens"]) == "max_tokens"
    assert meant_field("mx_tokn", ["max_tokens"]) is None
    assert meant_field("sto", ["stop"]) == "stop"
    assert meant_field("st", ["stop"]) is None
    assert meant_field("m", ["n"]) is None
    assert meant_field("top", ["top_k"]) is None
    assert all(meant_field(each, [f"{each}s", f"{each}_"]) is None for each in KNOWN_ELSEWHERE)


def test_the_header_is_bounded_and_printable(api):
    names = {f"nämé,{number}\n": number for number in range(500)}
    response = api.complete(**names)
    header = response.headers["x-baton-ignored"]
    assert len(header) <= MAX_IGNORED_BYTES
    *shown, last = header.split(", ")
    assert last == f"+{500 - len(shown)}"
    assert shown[0] == "n%C3%A4m%C3%A9%2C0%0A"
    assert ignored_header(["a", "b%"]) == b"a, b%25"
    assert len(ignored_header(["x" * 100] * 1000)) <= MAX_IGNORED_BYTES


def test_a_stream_and_an_error_name_them_too(api):
    with api.http.stream(
        "POST", COMPLETIONS, json={"model": MODEL, "prompt": "x", "zz": 1, "stream": True}
    ) as stream:
        assert stream.headers["x-baton-ignored"] == "zz"
        stream.read()
    error = api.complete(zz=1, model="other")
    assert (error.status_code, error.headers["x-baton-ignored"]) == (404, "zz")


def test_many_unknown_names_cost_no_more_than_a_few(monkeypatch):
    looked_up = []
    monkeypatch.setattr(
        "gateway.api.unknown_fields.ignored.meant_field",
        lambda name, known: looked_up.append(name),
    )
    messages = [{"role": "user", "content": "Hi", f"u{place}": 1} for place in range(1500)]
    body = ChatRequest.model_validate_json(json.dumps({"model": MODEL, "messages": messages}))
    names = take_ignored(body, refuse=False)
    assert names == [f"messages[].u{place}" for place in range(MAX_NAMES)]
    assert looked_up == [f"u{place}" for place in range(MAX_CHECKED)]


# -- what clients are known to send --------------------------------------------------------------


def test_lm_eval_and_litellm(api):
    messages = [
        {"role": "user", "content": "Hi", "type": "text"},
        {
            "role": "assistant",
            "content": "Ho",
            "id": "m",
            "reasoning_details": [{"type": "reasoning.text", "text": "x"}],
            "annotations": [{"type": "url_citation"}],
        },
        {
            "role": "user",
            "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        },
    ]
    fields = {
        "store": True,
        "service_tier": "flex",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
        "metadata": {"a": "b"},
    }
    response = api.post(CHAT, {"model": MODEL, "messages": messages, **fields})
    assert set(ignored(response)) == {
        "messages[].type",
        "messages[].id",
        "messages[].reasoning_details",
        "messages[].annotations",
        "store",
        "verbosity",
    }
    assert response.json()["service_tier"] == "default"


def test_claude_code(api):
    body = {
        "model": MODEL,
        "max_tokens": 20,
        "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "Hi"}],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "u"},
        "tools": [
            {"name": "Read", "input_schema": SCHEMA},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "stream": True,
    }
    response = api.post(f"{MESSAGES}?beta=true", body)
    assert ignored(response) == ["context_management", "tools[web_search_20250305]"]


CODEX: dict[str, object] = {
    "model": MODEL,
    "instructions": "Be short",
    "input": [{"type": "message", "role": "user", "content": "Hi"}],
    "tools": [
        {"type": "function", "strict": False, **FUNCTION},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__x", "description": "", "tools": [{"type": "function"}]},
        {"type": "local_shell"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "mcp", "server_label": "x"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "detailed"},
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"x": "y"},
}


def test_codex(api):
    response = api.post(RESPONSES, CODEX)
    kinds = ("custom", "web_search", "namespace", "local_shell", "image_generation", "mcp")
    assert set(ignored(response)) == {
        *(f"tools[{kind}]" for kind in kinds),
        "reasoning.summary",
        "include[reasoning.encrypted_content]",
        "text.verbosity",
        "client_metadata",
    }
    assert [tool["name"] for tool in response.json()["tools"]] == ["weather"]


def test_tools_that_are_all_left_out_are_none(api):
    tools = [{"type": "web_search"}]
    assert ignored(api.chat(tools=tools, tool_choice="auto")) == ["tools[web_search]"]
    refused = api.chat(tools=tools, tool_choice="required")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    assert "tools:" not in api.tokenizer.decode(prompts(api)[0], False)


def test_an_effort_that_the_template_does_not_know_is_ignored(checkpoint, tokenizer):
    with LiveApi(checkpoint, tokenizer) as plain:
        plain.reset()
        assert ignored(plain.chat(reasoning_effort="low")) == ["reasoning_effort"]
        body = {"model": MODEL, "input": "Hi", "reasoning": {"effort": "low"}}
        assert ignored(plain.post(RESPONSES, body)) == ["reasoning.effort"]
        body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        thinking = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
        assert ignored(plain.post(MESSAGES, body | thinking)) == [
            "thinking",
            "output_config.effort",
        ]
        plain.generator.wait_idle()
