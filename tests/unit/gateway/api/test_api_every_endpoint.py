"""What holds of every endpoint that generates: names, traces, silences, clients that go away."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.api.context import ApiLimits
from gateway.text.tokenizer import Tokenizer
from protocol.errors import Overloaded
from router.requests.interface import TokenDelta
from tests.unit.gateway.api_clients import CALL, SCHEMA, THINKING
from tests.unit.gateway.api_harness import MODEL, TIMEOUT_S, Forever, LiveApi, Pause

ASKED = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": ASKED, "max_tokens": 50},
}
ENDS = {
    "/v1/completions": "data: [DONE]",
    "/v1/chat/completions": "data: [DONE]",
    "/v1/responses": "event: response.completed",
    "/v1/messages": "event: message_stop",
}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
every_endpoint = pytest.mark.parametrize("path", BODIES)
either_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def body_for(path: str, stream: bool) -> dict[str, object]:
    return {"model": MODEL, "stream": stream, **BODIES[path]}


@pytest.fixture(scope="module")
def impatient(checkpoint: Path, tokenizer: Tokenizer) -> Iterator[LiveApi]:
    with LiveApi(checkpoint, tokenizer, ApiLimits(keepalive_s=0.02)) as live:
        yield live


@pytest.fixture
def impatient_api(impatient: LiveApi) -> Iterator[LiveApi]:
    impatient.reset()
    yield impatient
    impatient.generator.wait_idle()


@every_endpoint
@either_way
def test_the_client_s_id_and_trace_come_back(api: LiveApi, path: str, stream: bool) -> None:
    headers = {"x-request-id": "mine", "traceparent": TRACEPARENT}
    answer = api.post(path, body_for(path, stream), **headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "mine"
    [generation] = api.generator.requests
    assert generation.request_id == f"{answer.headers['x-baton-request-id']}-0"
    version, trace, span, flags = answer.headers["traceparent"].split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    assert span not in TRACEPARENT


def test_ids_begin_as_clients_expect(tools_api: LiveApi) -> None:
    """Clients tell kinds of ids by their beginnings: those of answers, items and calls."""
    tools_api.reset()
    tools_api.says(THINKING + "I ask." + CALL)
    named = {"name": "weather", "parameters": SCHEMA}
    tools: dict[str, dict[str, object]] = {
        "/v1/completions": {},
        "/v1/chat/completions": {"tools": [{"type": "function", "function": named}]},
        "/v1/responses": {"tools": [{"type": "function", **named}]},
        "/v1/messages": {
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "max_tokens": 150,
        },
    }
    found = [
        re.findall(r'"(?:call_)?id":"([a-z]+[-_])[0-9a-f]{24}', answer.text)
        for answer in (
            tools_api.post(path, body_for(path, False) | more) for path, more in tools.items()
        )
    ]
    assert [sorted(each) for each in found] == [
        ["cmpl-"],
        ["call_", "chatcmpl-"],
        ["call_", "fc_", "msg_", "resp_", "rs_"],
        ["msg_", "toolu_"],
    ]
    tools_api.generator.wait_idle()


@every_endpoint
@either_way
def test_an_error_before_the_first_token_has_a_status(
    api: LiveApi, path: str, stream: bool
) -> None:
    api.generator.script = lambda request: [Overloaded("no worker is ready", retry_after_s=7)]
    answer = api.post(path, body_for(path, stream))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert answer.json()["error"]["message"] == "no worker is ready"


@every_endpoint
@pytest.mark.parametrize("at", [0, 2], ids=["before the first token", "later"])
def test_a_silent_stream_is_kept_alive(impatient_api: LiveApi, path: str, at: int) -> None:
    impatient_api.says("one two")
    pause, usual = Pause(), impatient_api.generator.script

    def script(request):
        steps = list(usual(request))
        return [*steps[:at], pause, *steps[at:]]

    def shown(text: str) -> str:
        """What came where the silence was; on a slow machine there are others."""
        return text if at == 0 else text.partition("\ndata: ")[2]

    impatient_api.generator.script = script
    sign = "event: ping\n" if path == "/v1/messages" else ": keep-alive\n"
    text = ""
    with impatient_api.http.stream("POST", path, json=body_for(path, True)) as answer:
        for part in answer.iter_text():
            text += part
            if shown(text).count(sign) > 3:
                pause.end()
    assert shown(text).count(sign) > 3
    assert text.startswith(sign) or at > 0
    assert ENDS[path] in text


@every_endpoint
@either_way
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_client_that_goes_away_ends_the_generation(
    api: LiveApi, path: str, stream: bool, num_tokens: int
) -> None:
    gone = {"endpoint": path, "status": "499"}
    count = api.metric("baton_http_requests_total", **gone)
    api.generator.script = lambda request: [*[TokenDelta([65])] * num_tokens, Forever()]
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=TIMEOUT_S)
    headers = {"content-type": "application/json"}
    connection.request("POST", path, json.dumps(body_for(path, stream)), headers)
    api.generator.wait_active(1)
    if stream and num_tokens:
        answer = connection.getresponse()
        assert answer.readline().startswith((b"data: ", b"event: "))
        answer.close()
    connection.close()
    api.generator.wait_idle()
    api.settle(lambda: api.metric("baton_http_requests_in_flight", endpoint=path) == 0)
    assert api.metric("baton_http_requests_total", **gone) == count + 1


@every_endpoint
def test_a_client_that_leaves_its_second_stream_ends_that(api: LiveApi, path: str) -> None:
    """Which begins as soon as the first one, on the same connection, has ended."""
    usual = api.generator.script
    api.generator.script = lambda request: (
        usual(request) if len(api.generator.requests) == 1 else [Forever()]
    )
    body = json.dumps(body_for(path, True)).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", api.port), TIMEOUT_S) as connection:
        connection.sendall((head.encode() + body) * 2)
        received = b""
        while b"\r\n0\r\n\r\n" not in received:
            received += connection.recv(65536)
        api.generator.wait_active(1)
        assert len(api.generator.requests) == 2
    api.generator.wait_idle()
