"""Whatever a caller gets wrong is a 4xx in OpenAI's shape that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai.completion_request import CompletionRequest
from gateway.text.tokenizer import Tokenizer
from tests.effort import in_turn
from tests.unit.gateway.api.bad_values import CHAT, COMPLETIONS, OWN, REQUIRED, SHARED, VALID
from tests.unit.gateway.api_harness import (
    MAX_BODY_BYTES,
    MAX_CONTEXT,
    MODEL,
    LiveApi,
    write_checkpoint,
)

OF_BOTH = [(field, value) for field, values in SHARED.items() for value in values]
CASES = [
    (path, field, value)
    for path, own in OWN.items()
    for field, values in own.items()
    for value in values
]
CASES += [
    (path, field, value) for (field, value), path in in_turn(OF_BOTH, OWN) if field not in OWN[path]
]


def assert_refused(response, status: int, param: str | None) -> dict[str, object]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    found = error["param"]
    assert (found or "").partition("[")[0].partition(".")[0] == (param or ""), error
    if param is not None:
        assert param in error["message"]
    return error


@pytest.mark.parametrize(("path", "field", "value"), CASES)
def test_a_bad_value_is_refused_by_name(api, path, field, value):
    response = api.post(path, {**VALID[path], field: value})
    assert_refused(response, 400, field)
    assert api.generator.requests == []


@pytest.mark.parametrize("path", VALID)
def test_every_field_is_in_the_table(path):
    """So that a new field cannot go without bad values."""
    schema = CompletionRequest if path == COMPLETIONS else ChatRequest
    takes_anything = {
        name for name, field in schema.model_fields.items() if field.annotation is Any
    } - set(OWN[path])
    labels = {"prompt_cache_key", "safety_identifier", "documents"}
    assert schema.model_fields.keys() - takes_anything - labels <= {**SHARED, **OWN[path]}.keys()


@pytest.mark.parametrize("path", VALID)
def test_null_means_absent(api, path):
    optional = {**SHARED, **OWN[path]}.keys() - set(REQUIRED[path])
    assert api.post(path, {**VALID[path], **dict.fromkeys(optional)}).status_code == 200


TEXT_PART = {"type": "text", "text": "Hi"}
NULLS = {"mood": None, "text": None}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Hi"} | NULLS]}),
        (CHAT, {"messages": [{"role": "user", "content": [TEXT_PART | {"mood": None}]}]}),
        (CHAT, {"response_format": {"type": "text", "json_schema": None}}),
        (COMPLETIONS, {"stream": True, "stream_options": {"include_usage": True, **NULLS}}),
    ],
)
def test_unknown_nulls_are_absent_wherever_they_are(api, path, fields):
    """As clients have them that dump all that an answer may have."""
    asked = {**VALID[path], **fields}
    assert api.post(path, asked).status_code == 200
    assert "x-baton-ignored" not in api.post(path, asked).headers
    assert_refused(api.post(path, asked | {"n": 0}), 400, "n")


def test_a_null_that_says_something_stays(api):
    """What is dropped is what no schema of ours knows."""
    schema = {"enum": [None], "default": None}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert api.chat(response_format=wanted, mood=None).status_code == 200
    [request] = api.generator.requests
    assert '"default": null' in request.sampling.grammar


def test_a_number_beside_an_unknown_null_may_have_any_number_of_digits(api):
    body = b'{"model": "tiny", "prompt": "x", "mood": null, "seed": ' + b"9" * 5000 + b"}"
    headers = {"content-type": "application/json"}
    assert api.http.post(COMPLETIONS, content=body, headers=headers).status_code == 400


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": [], "tool_choice": "none", "functions": [], "function_call": "none"}),
        (CHAT, {"modalities": ["text"], "store": False, "service_tier": "auto", "metadata": {}}),
        (CHAT, {"response_format": {"type": "text"}, "continue_final_message": False}),
        (COMPLETIONS, {"suffix": "", "best_of": 1, "response_format": {"type": "text"}}),
        (COMPLETIONS, {"best_of": 2, "n": 2}),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 5}),
    ],
)
def test_values_that_ask_for_nothing_more_are_accepted(api, path, fields):
    response = api.post(path, {**VALID[path], **fields})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, fields in REQUIRED.items() for field in fields]
)
def test_a_missing_field_is_named(api, path, field):
    body = {key: value for key, value in VALID[path].items() if key != field}
    assert_refused(api.post(path, body), 400, field)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"best_of": 2, "n": 3}, "best_of"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 65}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b"], "best_of": 65}, "prompt"),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        (CHAT, {"min_tokens": 6, "max_completion_tokens": 5}, "min_tokens"),
        (CHAT, {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        (COMPLETIONS, {"stream": False, "stream_options": {}}, "stream_options"),
    ],
)
def test_fields_that_do_not_go_together(api, path, fields, param):
    assert_refused(api.post(path, {**VALID[path], **fields}), 400, param)


def test_why_a_template_is_refused_and_what_to_do_instead(api):
    error = assert_refused(
        api.post(CHAT, {**VALID[CHAT], "chat_template": "x"}), 400, "chat_template"
    )
    assert "a template is a program" in error["message"]
    assert "/v1/completions" in error["message"]


def test_nested_fields_are_named_in_full(api):
    part = {"type": "text", "text": 1}
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [part]}]
    error = assert_refused(api.post(CHAT, {"model": MODEL, "messages": messages}), 400, "messages")
    assert error["param"] == "messages[1].content[0].text"


def test_of_several_prompts_the_empty_one_is_named(api):
    response = api.post(COMPLETIONS, {"model": MODEL, "prompt": ["a", ""]})
    error = assert_refused(response, 400, "prompt")
    assert (error["param"], error["message"]) == ("prompt[1]", "'prompt[1]' must not be empty")


def test_a_list_that_is_too_short_is_told_its_length(api):
    error = assert_refused(api.post(CHAT, {"model": MODEL, "messages": []}), 400, "messages")
    assert error["message"] == "'messages': list should have at least 1 item, not 0"


@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize("body", ["[]", "1", '"x"', "null", "true"])
def test_a_body_must_be_an_object(api, path, body):
    response = api.http.post(path, content=body, headers={"content-type": "application/json"})
    assert "object" in str(assert_refused(response, 400, None)["message"])


@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{nope}",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"temperature": Nope}',
        b"[" * 50_000,
        b'{"model": "tiny"} trailing',
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_must_be_json(api, path, body):
    response = api.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "frequency_penalty", "repetition_penalty"]
)
def test_numbers_must_be_finite(api, path, number, field):
    body = json.dumps(VALID[path])[:-1] + f', "{field}": {number}}}'
    response = api.http.post(path, content=body, headers={"content-type": "application/json"})
    assert_refused(response, 400, field)


@pytest.mark.parametrize("path", VALID)
def test_the_content_type_must_be_json(api, path):
    body = json.dumps(VALID[path])
    wrong = api.http.post(path, content=body, headers={"content-type": "text/plain"})
    assert_refused(wrong, 415, None)
    with_charset = {"content-type": "Application/JSON; charset=utf-8"}
    assert api.http.post(path, content=body, headers=with_charset).status_code == 200
    of_json = {"content-type": "application/vnd.example+json"}
    assert api.http.post(path, content=body, headers=of_json).status_code == 200


@pytest.mark.parametrize("path", VALID)
def test_a_body_without_json_content_type_is_refused(api, path):
    body = json.dumps(VALID[path]).encode()
    assert_refused(api.http.post(path, content=body), 415, None)
    assert_refused(api.http.post(path, content=iter([body])), 415, None)
    empty = api.http.post(path, content=body, headers={"content-type": ""})
    assert "a content-type is missing" in empty.json()["error"]["message"]
    for wrong in ("text/plain; application/json", "text/plain;+json", "text/plain,+json", "+json"):
        refused = api.http.post(path, content=body, headers={"content-type": wrong})
        assert_refused(refused, 415, None)
    assert_refused(api.http.post(path), 400, None)


@pytest.mark.parametrize("path", VALID)
def test_a_body_that_is_too_large_is_refused(api, path):
    body = {**VALID[path], "user": "x" * MAX_BODY_BYTES}
    error = assert_refused(api.post(path, body), 413, None)
    assert str(MAX_BODY_BYTES) in str(error["message"])


@pytest.mark.parametrize("path", VALID)
def test_another_model_is_not_found(api, path):
    error = assert_refused(api.post(path, {**VALID[path], "model": "gpt-x"}), 404, "model")
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("length", "fields", "status"),
    [
        (MAX_CONTEXT - 16, {}, 200),
        (MAX_CONTEXT - 1, {}, 200),
        (MAX_CONTEXT, {}, 400),
        (MAX_CONTEXT + 5, {}, 400),
        (MAX_CONTEXT - 5, {"max_tokens": 5}, 200),
        (MAX_CONTEXT - 5, {"max_tokens": 6}, 400),
        (MAX_CONTEXT, {"max_tokens": 0, "echo": True}, 200),
    ],
)
def test_prompt_and_output_must_fit_the_context(api, length, fields, status):
    response = api.complete(prompt=[65] * length, **fields)
    if status == 200:
        assert response.status_code == 200, response.text
        return
    error = assert_refused(response, 400, "prompt")
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_CONTEXT) in str(error["message"])
    assert str(length) in str(error["message"])


def test_a_conversation_that_is_too_long(api):
    error = api.chat("x" * 500).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def user_says(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("path", VALID)
def test_a_text_far_too_long_is_refused_before_all_of_it_is_encoded(api, monkeypatch, path):
    text = "word " * 10_000
    question = {"prompt": text} if path == COMPLETIONS else {"messages": [user_says(text)]}
    kept = api.post(path, {**VALID[path], **question, "truncate_prompt_tokens": 5}).json()
    assert kept["usage"]["prompt_tokens"] == 5

    def encode(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        raise AssertionError(f"{len(text)} characters are encoded")

    monkeypatch.setattr(Tokenizer, "_by_tokenizer", encode)
    error = assert_refused(api.post(path, {**VALID[path], **question}), 400, next(iter(question)))
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {MAX_CONTEXT} tokens" in str(error["message"])


def test_the_template_s_own_message_is_passed_on(api):
    messages = [{"role": "tool", "content": "Hi"}]
    error = assert_refused(api.post(CHAT, {"model": MODEL, "messages": messages}), 400, "messages")
    assert "a tool message needs tool_call_id" in str(error["message"])


def test_a_text_is_refused_whose_tokens_the_model_does_not_know(tmp_path):
    """The model's vocabulary may be smaller than the tokenizer's."""
    folder = write_checkpoint(tmp_path)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 100, "eos_token_id": 0}))
    tokenizer = Tokenizer(folder)
    try:
        assert max(tokenizer.encode("wörld", add_special_tokens=False)) >= 100
        with LiveApi(folder, tokenizer) as small:
            for answer, param in (
                (small.chat("wörld"), "messages"),
                (small.complete("wörld"), "prompt"),
            ):
                error = assert_refused(answer, 400, param)
                assert "outside the vocabulary of 100 tokens" in str(error["message"])
            assert not small.generator.requests
    finally:
        tokenizer.close()


@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize("size", [0, 70_000], ids=["short", "long"])
def test_a_byte_order_mark_does_not_matter(api, path, size):
    text = json.dumps({**VALID[path], "user": None, "zz": "x" * size})
    headers = {"content-type": "application/json"}
    marked = api.http.post(path, content=text.encode("utf-8-sig"), headers=headers)
    assert marked.status_code == 200, marked.text
    assert marked.headers["x-baton-ignored"] == "zz"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"input": "Hi"}, "'messages' is required; 'input' is a field of /v1/responses"),
        (CHAT, {"prompt": "Hi"}, "'messages' is required; 'prompt' is a field of /v1/completions"),
        (
            "/v1/responses",
            {"messages": []},
            "'input' is required; 'messages' is a field of /v1/chat/completions",
        ),
        (CHAT, {}, "'messages' is required"),
    ],
)
def test_a_body_for_another_path_is_told_which(api, path, body, message):
    answer = api.http.post(path, json={"model": VALID[CHAT]["model"], **body})
    error = assert_refused(answer, 400, message.split("'")[1])
    assert error["message"] == message


@pytest.mark.parametrize("size", [0, 70_000], ids=["short", "long"])
def test_half_of_a_surrogate_pair_is_read_as_a_replacement_character(api, size):
    """As JavaScript escapes it where it cut an emoji; whole pairs and other text stay."""
    text = r"\ud83d\ude00 \\ud83d \uD83D|\ude00 \ud83d\ud83d\ude00\ud83d"
    body = f'{{"prompt": "{text}", "add_special_tokens": false, "zz": "{"x" * size}"}}'
    headers = {"content-type": "application/json"}
    answer = api.http.post("/tokenize", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    tokens = {"tokens": answer.json()["tokens"]}
    read = api.http.post("/detokenize", json=tokens).json()["prompt"]
    assert read == "\U0001f600 \\ud83d \ufffd|\ufffd \ufffd\U0001f600\ufffd"


def test_a_half_behind_very_many_backslashes_is_an_error(api):
    body = '{"prompt": "' + "\\" * 100 + '\\ud83d"}'
    answer = api.http.post("/tokenize", content=body, headers={"content-type": "application/json"})
    assert_refused(answer, 400, None)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_body_in_another_encoding_is_told_so(api, encoding):
    content = json.dumps(VALID[CHAT]).encode(encoding)
    answer = api.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert_refused(answer, 400, None)
    assert answer.json()["error"]["message"] == (
        "the body is not in UTF-8, but in UTF-16 or UTF-32"
    )
