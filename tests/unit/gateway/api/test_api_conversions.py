"""A client's text is converted within its limit, and off the event loop if the work may be long."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gateway.api.chat_prompt import MAX_TOOLS_BYTES
from gateway.api.choice_planner import MIN_TEXT_BYTES
from gateway.api.constraints import answer_grammar
from gateway.api.context import MAX_INLINE_BYTES, ApiLimits
from gateway.api.openai.chat_request import ChatRequest
from gateway.chat.conversation import ToolCall
from gateway.grammars import grammar, json_schemas
from gateway.grammars.grammar import MAX_GBNF_CHARS
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from protocol.sampling import MAX_GRAMMAR_CHARS
from tests.unit.gateway.api_harness import MODEL, LiveApi

LIMITS = ApiLimits(max_body_bytes=16 << 20)
LONG = "x" * (MAX_GRAMMAR_CHARS + 1)
LONG_GBNF = 'root ::= "a"\n' + "# comment\n" * (MAX_GBNF_CHARS // 10)


@pytest.fixture
def big_api(checkpoint, tokenizer):
    """A server that takes bodies of several MiB."""
    with LiveApi(checkpoint, tokenizer, limits=LIMITS) as live:
        live.reset()
        yield live
        live.generator.wait_idle()


@pytest.fixture
def big_tools_api(tools_checkpoint, tools_tokenizer):
    """The same, whose model calls tools."""
    with LiveApi(tools_checkpoint, tools_tokenizer, limits=LIMITS) as live:
        live.reset()
        yield live
        live.generator.wait_idle()


class Recorder:
    """In place of a function: notes the threads that call it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.threads: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        return self._function(*args, **kwargs)

    @property
    def was_in_pool(self) -> bool:
        """Whether every call was made in the tokenizer's threads."""
        return all(name.startswith("tokenizer") for name in self.threads)


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
@pytest.mark.parametrize(
    ("field", "value", "converter"),
    [
        ("regex", LONG, "regex_grammar"),
        ("choice", ["x" * 1000] * 1000, "choice_grammar"),
        ("json", json.dumps({"description": LONG}), "json_schema_grammar"),
    ],
)
def test_a_grammar_too_long_is_refused_before_it_is_converted(
    big_api, monkeypatch, endpoint, field, value, converter
):
    module = json_schemas if converter == "json_schema_grammar" else answer_grammar
    converted = Recorder(getattr(module, converter))
    monkeypatch.setattr(module, converter, converted)
    response = getattr(big_api, endpoint)(structured_outputs={field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == f"structured_outputs.{field}"
    assert str(MAX_GRAMMAR_CHARS) in error["message"]
    assert converted.threads == []


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
def test_gbnf_too_long_is_refused_before_it_is_converted(api, monkeypatch, endpoint):
    converted = Recorder(grammar.gbnf_to_lark)
    monkeypatch.setattr(grammar, "gbnf_to_lark", converted)
    response = getattr(api, endpoint)(structured_outputs={"grammar": LONG_GBNF})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "structured_outputs.grammar"
    assert str(MAX_GBNF_CHARS) in error["message"]
    assert converted.threads == []


@pytest.mark.parametrize("source", ["root ::= missing", "root ::= " + "(" * 30_000])
def test_gbnf_that_the_library_chokes_on_is_the_caller_s_fault(api, source):
    response = api.complete(structured_outputs={"grammar": source})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "structured_outputs.grammar"


def test_gbnf_is_converted_off_the_event_loop(api, monkeypatch):
    converted = Recorder(grammar.gbnf_to_lark)
    monkeypatch.setattr(grammar, "gbnf_to_lark", converted)
    source = 'root ::= "a"\n' + "# a comment\n" * 100
    assert api.complete(structured_outputs={"grammar": source}).status_code == 200
    assert converted.threads
    assert converted.was_in_pool


def test_a_large_schema_is_written_off_the_event_loop(big_api, monkeypatch):
    written = Recorder(json_schemas.json_schema_grammar)
    monkeypatch.setattr(json_schemas, "json_schema_grammar", written)
    named = {"name": "a", "schema": {"description": "x" * MAX_INLINE_BYTES}}
    big_api.chat(response_format={"type": "json_schema", "json_schema": named})
    assert len(written.threads) == 1
    assert written.was_in_pool


def test_a_large_conversation_is_converted_and_rendered_off_the_event_loop(api, monkeypatch):
    converted = Recorder(ChatRequest.conversation.fget)
    monkeypatch.setattr(ChatRequest, "conversation", property(converted))
    rendered = Recorder(ChatTemplate.render)
    monkeypatch.setattr(ChatTemplate, "render", lambda *args: rendered(*args))
    api.chat("x" * MAX_INLINE_BYTES)
    assert len(converted.threads) == len(rendered.threads) == 1
    assert converted.was_in_pool
    assert rendered.was_in_pool


def call(arguments: str) -> dict[str, object]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}


def ask(api: LiveApi, *messages: dict[str, object], **fields: object) -> Any:
    body = {"model": MODEL, "messages": messages, **fields}
    return api.post("/v1/chat/completions", body)


def test_the_arguments_of_calls_are_decoded_off_the_event_loop(api, monkeypatch):
    decoded = Recorder(ToolCall.for_template)
    monkeypatch.setattr(ToolCall, "for_template", lambda *args: decoded(*args))
    assert ask(api, call('{"city": "x"}')).status_code == 200
    assert len(decoded.threads) == 1
    assert decoded.was_in_pool


def test_arguments_nested_too_deeply_are_the_caller_s_fault(api):
    response = ask(api, call('{"a":' + "[" * 20_000))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].tool_calls"


NUMBERS = {"enum": [0.5] * (MAX_GRAMMAR_CHARS // 10)}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            "/v1/chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": NUMBERS},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            "/v1/chat/completions",
            {"structured_outputs": {"json": NUMBERS}},
            "structured_outputs.json",
        ),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": NUMBERS}}},
            "output_config.format.schema",
        ),
    ],
)
def test_a_schema_too_long_is_refused_before_it_is_encoded(
    big_api, monkeypatch, path, fields, param
):
    encoded = Recorder(grammar.json_schema_part)
    monkeypatch.setattr(grammar, "json_schema_part", encoded)
    messages = [{"role": "user", "content": "Hi"}]
    response = big_api.post(path, {"model": MODEL, "messages": messages, "max_tokens": 1, **fields})
    assert response.status_code == 400, response.text
    assert param in response.text
    assert encoded.threads == []


def test_tools_have_a_limit_together(big_tools_api, monkeypatch):
    rendered = Recorder(ChatTemplate.render)
    monkeypatch.setattr(ChatTemplate, "render", lambda *args: rendered(*args))
    half = {"type": "object", "description": "x" * (MAX_TOOLS_BYTES // 2)}
    tools = [{"type": "function", "function": {"name": name, "parameters": half}} for name in "abc"]
    response = big_tools_api.chat(tools=tools)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert str(MAX_TOOLS_BYTES) in response.json()["error"]["message"]
    assert rendered.threads == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {"prompt": "x" * (MIN_TEXT_BYTES + 1)}, "prompt"),
        ("/v1/completions", {"prompt": "x" * (MIN_TEXT_BYTES + 1)}, "prompt"),
        ("/v1/completions", {"prompt": "é" * (MIN_TEXT_BYTES // 2 + 1)}, "prompt"),
        ("/v1/completions", {"prompt": "x", "suffix": "x" * (MIN_TEXT_BYTES + 1)}, "suffix"),
    ],
)
def test_a_text_too_long_to_encode_is_not_encoded(big_api, monkeypatch, path, fields, param):
    encoded = Recorder(Tokenizer.encode)
    monkeypatch.setattr(Tokenizer, "_by_tokenizer", lambda *args: encoded(*args))
    body = {"model": MODEL, **fields}
    if path != "/tokenize":
        body["truncate_prompt_tokens"] = 5
    response = big_api.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert encoded.threads == []


def test_messages_too_long_to_encode_are_not_rendered(big_api, monkeypatch):
    rendered = Recorder(ChatTemplate.render)
    monkeypatch.setattr(ChatTemplate, "render", lambda *args: rendered(*args))
    for field in ({}, {"truncate_prompt_tokens": 5}):
        response = big_api.chat("x" * (MIN_TEXT_BYTES + 1), **field)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
    assert rendered.threads == []


def test_token_ids_beyond_the_context_are_refused(big_api):
    response = big_api.complete([65] * 100_000)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_many_tokens_are_named_off_the_event_loop(api, monkeypatch):
    named = Recorder(Tokenizer.token_name)
    monkeypatch.setattr(Tokenizer, "token_name", lambda *args: named(*args))
    body = {"prompt": "x y " * 1000, "return_token_strs": True}
    assert api.post("/tokenize", body).json()["count"] == len(named.threads) > 1000
    assert named.was_in_pool
