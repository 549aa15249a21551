"""Streams as bytes on the wire, their errors, and clients that go away."""

from __future__ import annotations

import http.client
import itertools
import json

import pytest

from protocol.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    GenerationFailed,
    Overloaded,
    UnusableConstraint,
)
from protocol.messages import FinishReason
from router.requests.interface import TokenDelta
from tests.unit.gateway.api_harness import MODEL, TIMEOUT_S, Forever, events_of


def body_for(path: str, **fields: object) -> dict[str, object]:
    if path.endswith("chat/completions"):
        return {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
    return {"model": MODEL, "prompt": "x", **fields}


PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize("path", PATHS)
def test_the_wire_format(api, path):
    response = api.post(path, body_for(path, stream=True))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    events = events_of(response.text)
    assert {event["id"] for event in events} == {response.headers["x-request-id"]}
    assert all("usage" not in event for event in events)
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (
        len(events) - 1
    )
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", PATHS)
def test_usage_comes_last_and_only_if_asked_for(api, path):
    fields = body_for(path, stream=True, stream_options={"include_usage": True})
    *events, last = events_of(api.post(path, fields).text)
    assert [event["usage"] for event in events] == [None] * len(events)
    assert last["choices"] == []
    whole = api.post(path, body_for(path)).json()["usage"]
    assert last["usage"] == whole


def test_choices_interleave(api):
    api.says("one two three")
    events = events_of(api.complete(n=2, stream=True, max_tokens=50).text)
    indices = [event["choices"][0]["index"] for event in events]
    assert indices.index(1) < len(indices) - 1 - indices[::-1].index(0)
    for index in (0, 1):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == "one two three"
        assert own[-1]["finish_reason"] == "stop"


def test_every_choice_of_a_chat_names_its_role_once(api):
    events = events_of(api.chat(n=3, stream=True).text)
    roles = [
        event["choices"][0]["index"] for event in events if "role" in event["choices"][0]["delta"]
    ]
    assert sorted(roles) == [0, 1, 2]


def test_a_stop_string_across_tokens_is_never_seen(api):
    api.says("Hello there. A stop string stops.")
    events = events_of(api.chat(stream=True, stop=["never", "re. A st"]).text)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == "Hello the"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    api.generator.wait_idle()


def test_a_stop_string_ends_a_generation_that_would_go_on(api):
    ids = api.tokenizer.encode("one two", add_special_tokens=False)
    api.generator.script = lambda request: [TokenDelta([id_]) for id_ in ids] + [Forever()]
    for stream in (True, False):
        response = api.complete(stop="two", stream=stream, max_tokens=50)
        assert response.status_code == 200
        api.generator.wait_idle()


def test_echo_comes_before_the_first_token(api):
    api.says(" there")
    events = events_of(api.complete(prompt="Hello", echo=True, stream=True, n=2).text)
    for index in (0, 1):
        texts = [e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == index]
        assert "".join(texts) == "Hello there"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", [{"n": n, "stream": s} for n in (1, 2) for s in (True, False)])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("busy", retry_after_s=7), 503, "overloaded"),
        (DeadlineUnreachable("a queue", retry_after_s=7), 503, "deadline_unreachable"),
        (GenerationFailed("three attempts failed"), 500, "generation_failed"),
        (DeadlineExceeded("it took too long"), 504, "deadline_exceeded"),
        (UnusableConstraint("its masks take long", "grammar_too_slow"), 400, "grammar_too_slow"),
        (RuntimeError("secret detail"), 500, "internal_error"),
    ],
)
def test_an_error_before_the_first_token_has_a_status(api, path, fields, error, status, code):
    api.generator.script = lambda request: [error]
    response = api.post(path, body_for(path, **fields))
    assert response.status_code == status
    found = response.json()["error"]
    assert found["code"] == code
    assert found.keys() == {"message", "type", "param", "code"}
    assert response.headers.get("retry-after") == ("7" if status == 503 else None)
    assert response.headers.get("x-should-retry") == ("false" if status == 504 else None)
    if status == 500:
        assert response.headers["x-request-id"] in found["message"]
    assert "secret" not in response.text
    api.generator.wait_idle()


@pytest.mark.parametrize("n", [1, 2])
def test_an_error_in_mid_stream_is_the_last_event(api, n):
    ids = api.tokenizer.encode("one two", add_special_tokens=False)
    failures = api.metric("baton_http_stream_errors_total")

    def fail_in_first_choice(request):
        steps = [TokenDelta([id_]) for id_ in ids]
        is_first = request.request_id.endswith("-0")
        return [*steps, GenerationFailed("worker lost") if is_first else Forever()]

    api.generator.script = fail_in_first_choice
    response = api.complete(stream=True, n=n, max_tokens=50)
    lines = [each for each in response.text.split("\n") if each.startswith("data: ")]
    events = [json.loads(each.removeprefix("data: ")) for each in lines]
    assert (
        "".join(
            event["choices"][0]["text"]
            for event in events[:-1]
            if event["choices"][0]["index"] == 0
        )
        == "one two"
    )
    assert "worker lost" in events[-1]["error"]["message"]
    assert response.headers["x-request-id"] in events[-1]["error"]["message"]
    api.generator.wait_idle()
    api.settle(lambda: api.metric("baton_http_stream_errors_total") == failures + 1)


def test_a_generation_that_breaks_off_is_an_error(api):
    api.generator.script = lambda request: [TokenDelta([65])]
    assert api.complete().json()["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("stream", "tokens_before"), [(True, 1), (True, 0), (False, 1), (False, 0)]
)
def test_a_client_that_goes_away_ends_its_generations(api, path, n, stream, tokens_before):
    gone = {"endpoint": path, "status": "499"}
    count = api.metric("baton_http_requests_total", **gone)
    api.generator.script = lambda request: [TokenDelta([65])] * tokens_before + [Forever()]
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=TIMEOUT_S)
    connection.request(
        "POST",
        path,
        json.dumps(body_for(path, n=n, stream=stream)),
        {"content-type": "application/json"},
    )
    if stream and tokens_before:
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        api.generator.wait_active(n)
        response.close()
    api.generator.wait_active(n)
    connection.close()
    api.generator.wait_idle()
    api.settle(lambda: api.metric("baton_http_requests_in_flight", endpoint=path) == 0)
    assert api.metric("baton_http_requests_total", **gone) == count + 1


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_stops_reading_holds_nothing_once_it_is_gone(api, n):
    """The server is writing, not waiting for tokens, when the connection ends."""
    api.generator.script = lambda request: itertools.repeat(TokenDelta([65] * 1000))
    with api.http.stream(
        "POST", "/v1/completions", json=body_for("/v1/completions", n=n, stream=True)
    ) as response:
        lines = response.iter_lines()  # kept: httpx closes the connection when it goes
        assert next(lines).startswith("id: ")
        api.generator.wait_active(n)
    api.generator.wait_idle()


def test_usage_counts_every_prompt_once(api):
    api.says("one", FinishReason.LENGTH)
    usage = api.complete(prompt=["Hello", "Hello there"], n=2, max_tokens=9).json()["usage"]
    lengths = [len(api.tokenizer.encode(text, True)) for text in ("Hello", "Hello there", "one")]
    assert usage["prompt_tokens"] == lengths[0] + lengths[1]
    assert usage["completion_tokens"] == 4 * lengths[2]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("accept", "has_ids"),
    [
        ("*/*", False),
        ("application/json", False),
        ("text/event-stream", True),
        ("application/json, text/event-stream", True),
    ],
)
def test_events_have_ids_for_clients_that_read_event_streams(api, path, accept, has_ids):
    """vllm bench and others read no other field than `data` of OpenAI's older APIs."""
    asked = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x"}
    name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    body = {"model": MODEL, name: asked[name], "stream": True}
    answer = api.post(path, body, accept=accept)
    assert answer.status_code == 200, answer.text
    events = answer.text.strip().split("\n\n")
    ids = [each for each in events if each.startswith("id: ")]
    assert len(ids) == (len(events) - (path != "/v1/responses") if has_ids else 0)
    if not has_ids and path != "/v1/responses":
        assert all(each.startswith("data: ") and "\n" not in each for each in events)
