"""Everything of the API that generates nothing: models, health, metrics, paths, ids."""

from __future__ import annotations

import json
import socket

import anthropic
import openai
import pytest
from anthropic.types import ModelInfo as AnthropicModel

from gateway.api.operations import OPERATIONS
from gateway.http.access import Door
from gateway.http.paths import meant_path
from process.version import baton_version
from tests.unit.gateway.api_harness import MAX_CONTEXT, MODEL, TIMEOUT_S, LiveApi


def test_models(api):
    entry = {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "baton",
        "max_model_len": MAX_CONTEXT,
        "type": "model",
        "display_name": MODEL,
        "created_at": "2023-11-14T22:13:20Z",
        "max_input_tokens": MAX_CONTEXT,
        "max_tokens": MAX_CONTEXT,
        "lifecycle": "active",
    }
    whole = {"object": "list", "data": [entry], "has_more": False}
    whole |= {"first_id": MODEL, "last_id": MODEL}
    for path in ("/v1/models", "/v1/models/"):
        assert api.http.get(path).json() == whole
    assert api.http.get(f"/v1/models/{MODEL}").json() == entry
    missing = api.http.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_clients_list_models(api):
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none") as client:
        assert [each.id for each in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).created == 1_700_000_000
    with anthropic.Anthropic(base_url=api.url, api_key="none") as claude:
        [listed] = list(claude.models.list(limit=1))
        assert listed == claude.models.retrieve(MODEL)
        assert (listed.type, listed.id, listed.display_name) == ("model", MODEL, MODEL)
        assert listed.created_at.timestamp() == 1_700_000_000
        assert not AnthropicModel.model_validate_json(listed.model_dump_json()).deprecated_at


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_health_follows_readiness(api, path):
    assert api.http.get(path).status_code == 200
    api.unready_reason = "no decode worker is ready"
    response = api.http.get(path)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["message"] == "no decode worker is ready"


def test_alive_and_version_whether_ready_or_not(api):
    api.unready_reason = "no decode worker is ready"
    assert api.http.get("/live").json() == {"status": "ok"}
    assert api.http.get("/version").json() == {"version": baton_version()}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/rerank"])
def test_what_needs_another_kind_of_model_says_so(api, path):
    error = api.post(path, {"model": MODEL, "input": "x"}).json()["error"]
    assert error["message"] == f"not served: the model only generates text: POST {path}"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/health", 405, "method_not_allowed"),
        ("POST", "/v1/responses/compact", 404, "not_found"),
    ],
)
def test_other_paths_and_methods(api, method, path, status, code):
    response = api.http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert path in error["message"]
    assert "did you mean" not in error["message"]
    assert ("allow" in response.headers) == (status == 405)
    if status == 405:
        assert error["message"].endswith(f"; it takes {response.headers['allow']}")


WRONG_PATHS = {
    "/chat/completions": "/v1/chat/completions",
    "/v1/v1/chat/completions": "/v1/chat/completions",
    "/v1/chat/completions/": "/v1/chat/completions",
    "//v1//chat/completions": "/v1/chat/completions",
    "/V1/Chat/Completions": "/v1/chat/completions",
    "/v1/chat/completion": "/v1/chat/completions",
    "/v1/chat": "/v1/chat/completions",
    "/api/chat": "/v1/chat/completions",
    "/openai/v1/responses": "/v1/responses",
    "/openai/deployments/x/completions": "/v1/completions",
    "/v1/v1/messages": "/v1/messages",
    "/messages/count_tokens": "/v1/messages/count_tokens",
    "/generate": "/v1/completions",
    "/models": "/v1/models",
    "/v1/tokenize": "/tokenize",
    "/health/": "/health",
    "/readyz": "/ready",
    "/v1/openapi.json": "/openapi.json",
}


@pytest.mark.parametrize("path", WRONG_PATHS)
def test_a_wrong_path_is_answered_with_the_right_one(api, path):
    with socket.create_connection(("127.0.0.1", api.port), TIMEOUT_S) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        connection.sendall(head.encode() + b"content-length: 2\r\n\r\n{}")
        answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.1 404")
    error = json.loads(answer.partition("\r\n\r\n")[2])
    assert error["error"]["message"].endswith(f"{path}; did you mean {WRONG_PATHS[path]}?")
    assert (error.get("type") == "error") == WRONG_PATHS[path].startswith("/v1/messages")


@pytest.mark.parametrize("path", ["/nowhere", "/", "/v1/files", "/fleets", "/v1/" + "x" * 5000])
def test_a_path_like_none_of_the_api_has_no_hint(path):
    assert meant_path(path) is None


def test_no_operators_path_stands_for_one_of_the_api():
    assert not any(meant_path(each.path) for each in OPERATIONS if each.door is not Door.API)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_ids_are_unique_and_say_what_was_asked(api, path):
    prefix = "cmpl-" if path == "/v1/completions" else "chatcmpl-"
    ask = api.complete if path == "/v1/completions" else api.chat
    first, second = ask(n=2), ask()
    assert first.json()["id"] != second.json()["id"]
    assert first.json()["id"] == first.headers["x-request-id"]
    assert first.json()["id"].startswith(prefix)
    ids = [request.request_id for request in api.generator.requests]
    assert ids == [f"{first.json()['id']}-0", f"{first.json()['id']}-1", f"{second.json()['id']}-0"]


@pytest.mark.parametrize(
    ("client_id", "is_kept"),
    [
        (b"trace-42", True),
        (b"a b", True),
        (b"x" * 128, True),
        (b"x" * 129, False),
        (b"", False),
        (b"caf\xe9", False),
        (b"a\tb", False),
    ],
)
def test_the_client_s_own_request_id_is_repeated_if_sane(api, client_id, is_kept):
    headers = {b"x-request-id": client_id}
    body = {"model": MODEL, "prompt": "Hi"}
    response = api.http.post("/v1/completions", json=body, headers=headers)
    own = response.json()["id"]
    assert response.headers["x-request-id"] == (client_id.decode() if is_kept else own)
    assert response.headers["x-baton-request-id"] == own


def test_errors_carry_an_id_too(api):
    response = api.complete(temperature=9)
    assert response.headers["x-request-id"].startswith("cmpl-")
    assert api.http.get("/nowhere").headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("prompts", [1, 3])
def test_the_hit_rate_is_a_share_whatever_the_number_of_choices(api, n, prompts):
    names = ("baton_prompt_tokens_total", "baton_cached_prompt_tokens_total")
    before = [api.metric(each) for each in names]
    api.says("one")
    body = api.complete(prompt=["Hello world"] * prompts, n=n, max_tokens=50).json()
    prompt, cached = (api.metric(each) - old for each, old in zip(names, before, strict=True))
    assert prompt == body["usage"]["prompt_tokens"]
    assert cached == body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * prompts
    assert cached <= prompt


def test_metrics_count_what_happened(api):
    endpoint = "/v1/completions"
    names = {
        "ok": ("baton_http_requests_total", {"endpoint": endpoint, "status": "200"}),
        "refused": ("baton_http_requests_total", {"endpoint": endpoint, "status": "400"}),
        "prompt": ("baton_prompt_tokens_total", {}),
        "cached": ("baton_cached_prompt_tokens_total", {}),
        "output": ("baton_output_tokens_total", {}),
        "first": ("baton_time_to_first_token_seconds_count", {}),
        "between": ("baton_inter_token_seconds_count", {}),
        "duration": ("baton_http_request_seconds_count", {"endpoint": endpoint}),
    }
    before = {key: api.metric(name, **labels) for key, (name, labels) in names.items()}
    api.says("one two")
    usage = api.complete(n=2, max_tokens=50).json()["usage"]
    api.complete(n=0)
    api.settle(lambda: api.metric("baton_http_requests_in_flight", endpoint=endpoint) == 0)
    grown = {key: api.metric(name, **labels) - before[key] for key, (name, labels) in names.items()}
    assert grown == {
        "ok": 1,
        "refused": 1,
        "prompt": usage["prompt_tokens"],
        "cached": 2,
        "output": usage["completion_tokens"],
        "first": 2,
        "between": usage["completion_tokens"] - 2,
        "duration": 2,
    }


def test_metrics_are_readable_by_prometheus(api):
    response = api.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE baton_time_to_first_token_seconds histogram" in response.text


def test_paths_that_nobody_serves_do_not_become_labels(api):
    api.http.get("/nowhere/in/particular")
    assert "particular" not in api.http.get("/metrics").text


TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_client_s_trace_goes_on(api):
    answer = api.http.get("/v1/models", headers={"traceparent": TRACEPARENT})
    ours = answer.headers["traceparent"]
    assert ours[:36] == TRACEPARENT[:36]
    assert ours[36:52] != TRACEPARENT[36:52]
    for header in ({}, {"traceparent": "00-nonsense"}):
        assert "traceparent" not in api.http.get("/v1/models", headers=header).headers


def test_a_model_of_several_names_answers_to_each_and_carries_the_first(checkpoint, tokenizer):
    with LiveApi(checkpoint, tokenizer, other_names=("claude-haiku", "org/tiny")) as named:
        named.reset()
        listed = named.http.get("/v1/models").json()["data"]
        assert [each["id"] for each in listed] == [MODEL, "claude-haiku", "org/tiny"]
        assert named.http.get("/v1/models/org/tiny").json()["id"] == "org/tiny"
        messages = [{"role": "user", "content": "x"}]
        for path, fields in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/messages", {"messages": messages, "max_tokens": 5}),
            ("/v1/responses", {"input": "x"}),
        ):
            answer = named.post(path, {"model": "claude-haiku", **fields})
            assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
        assert named.post("/tokenize", {"model": "org/tiny", "prompt": "x"}).status_code == 200
        missing = named.post("/v1/completions", {"model": "gpt", "prompt": "x"})
        assert missing.status_code == 404
        assert "'tiny', 'claude-haiku', 'org/tiny'" in missing.json()["error"]["message"]
        named.generator.wait_idle()
