"""Large and bad bodies: validation stops at the first errors, within bounds, off the event loop."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pydantic
import pytest

from gateway.api import strict_model
from gateway.api.anthropic.request import MessagesRequest
from gateway.api.body_reader import MAX_INLINE_BYTES
from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai.completion_request import CompletionRequest
from gateway.api.openai_responses.request import ResponsesRequest
from gateway.api.strict_model import (
    MAX_BYTES_OUTSIDE,
    MAX_DIGITS,
    MAX_PARTS,
    MAX_VALUES,
    check_bounds,
)
from gateway.api.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.output.event_ids import request_digest
from http_kit.errors import MAX_MESSAGE_CHARS, MAX_PARAM_CHARS
from protocol.errors import InvalidRequest
from tests.unit.gateway.api_harness import MODEL

MANY: list[Any] = [None] * 1000
MODEL_FIELD = {"model": MODEL}
USER = {"role": "user", "content": "Hi"}


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


UNBOUNDED = [
    (ChatRequest, "messages", MANY, "messages[0]"),
    (ChatRequest, "messages", user(MANY), "messages[0].content[0]"),
    (ChatRequest, "messages", [USER | {"tool_calls": MANY}], "messages[0].tool_calls[0]"),
    (ChatRequest, "documents", MANY, "documents[0]"),
    (ChatRequest, "tools", MANY, "tools[0]"),
    (ChatRequest, "logit_bias", dict.fromkeys(map(str, range(1000)), "x"), "logit_bias.0"),
    (ChatRequest, "metadata", dict.fromkeys(map(str, range(1000)), 1), "metadata.0"),
    (ChatRequest, "stop", MANY, "stop[0]"),
    (CompletionRequest, "prompt", ["a", *MANY], "prompt[1]"),
    (CompletionRequest, "prompt", MANY, "prompt[0]"),
    (CompletionRequest, "prompt", [[1], *MANY], "prompt[1]"),
    (CompletionRequest, "prompt", [MANY], "prompt[0][0]"),
    (ResponsesRequest, "input", MANY, "input[0]"),
    (ResponsesRequest, "input", user(MANY), "input[0].content[0]"),
    (MessagesRequest, "messages", MANY, "messages[0]"),
    (MessagesRequest, "messages", user(MANY), "messages[0].content[0]"),
    (MessagesRequest, "system", MANY, "system"),
    (TokenizeRequest, "messages", MANY, "messages[0]"),
    (DetokenizeRequest, "tokens", MANY, "tokens[0]"),
]
PATHS = {
    ChatRequest: "/v1/chat/completions",
    CompletionRequest: "/v1/completions",
    ResponsesRequest: "/v1/responses",
    MessagesRequest: "/v1/messages",
    TokenizeRequest: "/tokenize",
    DetokenizeRequest: "/detokenize",
}
MOST_ERRORS = 8  # required fields that are missing, and the branches of a union


@pytest.mark.parametrize(("schema", "field", "value", "place"), UNBOUNDED)
def test_only_the_first_error_of_a_list_is_collected(schema, field, value, place):
    with pytest.raises(pydantic.ValidationError) as caught:
        schema.model_validate_json(json.dumps({**MODEL_FIELD, field: value}))
    assert caught.value.error_count() <= MOST_ERRORS


@pytest.mark.parametrize(("schema", "field", "value", "place"), UNBOUNDED)
def test_the_first_error_of_a_list_is_named(api, schema, field, value, place):
    needed = {"max_tokens": 1, "messages": [USER]}
    others = {name: needed[name] for name in needed.keys() & schema.model_fields.keys()}
    response = api.post(PATHS[schema], {**MODEL_FIELD, **others, field: value})
    assert response.status_code == 400
    assert place in response.json()["error"]["message"]


def test_unknown_nulls_of_many_messages_are_absent(api):
    messages = [USER | {f"null{place}": None} for place in range(20)]
    response = api.post("/v1/chat/completions", {**MODEL_FIELD, "messages": messages})
    assert "known field" not in response.text


def test_an_error_quotes_no_more_than_its_bounds(api):
    error = api.complete(structured_outputs={"json": {"type": "x" * 10_000}}).json()["error"]
    assert len(error["message"]) <= MAX_MESSAGE_CHARS
    error = api.complete(**{"x" * 10_000: 1}, model="y" * 10_000).json()["error"]
    assert len(error["message"]) <= MAX_MESSAGE_CHARS
    assert len(error["param"]) <= MAX_PARAM_CHARS
    assert error["message"].startswith("the model 'yyy")


@pytest.mark.parametrize("size", [MAX_INLINE_BYTES, MAX_INLINE_BYTES + 1])
def test_a_large_body_is_validated_and_hashed_in_a_thread(api, monkeypatch, size):
    threads: list[tuple[str, str]] = []
    validate, digest = CompletionRequest.model_validate_json, request_digest

    def validating(body: bytes, **options: Any) -> CompletionRequest:
        threads.append(("validate", threading.current_thread().name))
        return validate(body, **options)

    def hashing(body: bytes, owner: str) -> bytes:
        threads.append(("hash", threading.current_thread().name))
        return digest(body, owner)

    monkeypatch.setattr(CompletionRequest, "model_validate_json", validating)
    monkeypatch.setattr("gateway.api.body_reader.request_digest", hashing)
    body = json.dumps({**MODEL_FIELD, "prompt": "Hi", "stream": True}).encode()
    json_type = {"content-type": "application/json"}
    sent = api.http.post("/v1/completions", content=body.ljust(size), headers=json_type)
    assert sent.status_code == 200
    assert [what for what, _ in threads] == ["validate", "hash"]
    in_pool = {name.startswith("tokenizer") for _, name in threads}
    assert in_pool == {size > MAX_INLINE_BYTES}


@pytest.mark.parametrize(
    ("body", "num_parts", "num_values"),
    [
        (b"{}", 1, 1),
        (b'{"a": [1, 2, 3]}', 3, 5),
        (b'{"a": "[,[,\\"{\\\\", "b": "x\\\\\\""}', 5, 6),
        (b'"' + b"\\\\" * 10 + b'"', 1, 1),
        (b'["\\u005b", {"{": {}}]', 5, 6),
    ],
)
def test_values_are_counted_outside_strings(monkeypatch, body, num_parts, num_values):
    json.loads(body)
    counts: list[int] = []
    monkeypatch.setattr(strict_model, "_check", lambda count, *_: counts.append(count))
    check_bounds(body)
    assert counts[-3:-1] == [num_parts, num_values]


@pytest.mark.parametrize(
    "value",
    [
        '"",' * MAX_PARTS,
        "[]," * MAX_PARTS,
        "{}," * MAX_PARTS,
        "1," * MAX_VALUES,
        " " * MAX_BYTES_OUTSIDE,
    ],
)
def test_too_many_values_are_refused_before_validation(value):
    with pytest.raises(InvalidRequest, match="the limit is"):
        check_bounds(f'{{"messages": [{value}1]}}'.encode())


def test_digits_of_a_number_are_bounded():
    """Converting one takes quadratic time."""
    longest = "9" * MAX_DIGITS
    check_bounds(f'{{"seed": {longest}, "user": "9{longest}"}}'.encode())
    for number in (longest + "0", f"0.{longest}1", f"1e{longest}1"):
        with pytest.raises(InvalidRequest, match="more than 1000 digits"):
            check_bounds(f'{{"user": "a", "seed": {number}}}'.encode())


def test_escaped_characters_are_bounded(monkeypatch):
    body = rb'{"a": "\\ \" \n \u00e9 \\\" n"}'
    num_escapes = len(json.loads(body)["a"].replace(" ", "").removesuffix("n"))
    monkeypatch.setattr(strict_model, "MAX_ESCAPES", num_escapes)
    check_bounds(body)
    monkeypatch.setattr(strict_model, "MAX_ESCAPES", num_escapes - 1)
    with pytest.raises(InvalidRequest, match=f"has {num_escapes} escaped characters"):
        check_bounds(body)


def test_a_request_with_too_many_values_is_refused_with_their_number(api, monkeypatch):
    monkeypatch.setattr(strict_model, "MAX_PARTS", 1000)
    values = [""] * 1001
    response = api.complete(None, user=values, suffix=" " * MAX_INLINE_BYTES)
    assert response.status_code == 400
    assert re.search(r"has \d+ strings.*the limit is 1000", response.text)


def test_a_long_text_is_no_part_of_the_bound():
    long, short = ({"prompt": text} for text in ("[1,2,3], {}" * 1_000_000, ""))
    assert check_bounds(json.dumps(long).encode()) == check_bounds(json.dumps(short).encode())
