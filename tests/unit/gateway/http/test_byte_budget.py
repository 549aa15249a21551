"""Bodies, fields and whole answers of all requests in flight share one budget of bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.api.context import ApiLimits
from gateway.http.byte_budget import ByteBudget
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ConfigError, Overloaded
from protocol.messages import FinishReason
from protocol.sampling import TokenLogprobs
from router.requests.interface import TokenDelta
from router_process.settings import RouterSettings
from tests.unit.gateway.api_harness import MODEL, TIMEOUT_S, LiveApi, Pause

LIMIT = 12_000
LARGE = "x" * 6000


@pytest.fixture
def api(checkpoint: Path, tokenizer: Tokenizer) -> Iterator[LiveApi]:
    limits = ApiLimits(max_body_bytes=8000, max_inflight_bytes=LIMIT)
    with LiveApi(checkpoint, tokenizer, limits, max_context=LIMIT) as live:
        live.reset()
        yield live
        live.generator.wait_idle()


def in_flight(api: LiveApi) -> float:
    return api.metric("baton_http_bytes_in_flight")


def test_a_budget_counts_what_is_held() -> None:
    budget = ByteBudget(10)
    budget.take(6)
    budget.check(4)
    budget.retry_after_s = lambda: 7
    with pytest.raises(Overloaded, match="10 bytes") as caught:
        budget.take(5)
    assert caught.value.retry_after_s == 7
    assert budget.in_flight == 6
    budget.give_back(6)
    budget.take(10)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_beyond_the_budget_is_503_until_another_request_ends(
    api: LiveApi, is_chunked: bool
) -> None:
    pause = Pause()
    api.generator.script = lambda request: [pause]
    first = threading.Thread(target=lambda: api.complete(LARGE))
    first.start()
    api.generator.wait_active(1)
    assert 7000 < in_flight(api) < 8000, "the body and its fields"

    body = b'{"model": "%s", "prompt": "%s"}' % (MODEL.encode(), LARGE.encode())
    content = iter([body[:3000], body[3000:]]) if is_chunked else body
    with httpx.Client(base_url=api.url, timeout=TIMEOUT_S) as client:
        refused = client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "overloaded"
    assert in_flight(api) < 8000
    api.says("Hello")
    assert api.complete("Hi").status_code == 200

    pause.end()
    first.join()
    api.settle(lambda: in_flight(api) == 0)
    assert api.complete(LARGE).status_code == 200


def test_a_declared_body_without_room_is_refused_before_any_of_it_arrives(api: LiveApi) -> None:
    pause = Pause()
    api.generator.script = lambda request: [pause]
    first = threading.Thread(target=lambda: api.complete(LARGE))
    first.start()
    api.generator.wait_active(1)
    with socket.create_connection(("127.0.0.1", api.port), timeout=TIMEOUT_S) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 6000\r\n\r\n"
        )
        assert client.recv(4096).startswith(b"HTTP/1.1 503 ")
    pause.end()
    first.join()


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_every_end_of_a_request_gives_its_bytes_back(api: LiveApi, path: str) -> None:
    for body in (
        {"model": MODEL, "prompt": LARGE},
        {"prompt": 1, "user": LARGE},
        {"x": "x" * 9000},
    ):
        api.post(path, body)
        api.settle(lambda: in_flight(api) == 0)


def test_the_budget_must_hold_one_body() -> None:
    with pytest.raises(ConfigError, match="max_inflight_bytes must be at least max_body_bytes"):
        RouterSettings(
            model="x",
            redis_url="redis://x",
            cluster="x",
            cluster_secret="x" * 32,
            max_body_bytes=4096,
            max_inflight_bytes=2048,
            parent_pid=None,
            log_level="info",
            log_format="text",
        )


def logprobs_of(count: int, tokens: int) -> list[TokenDelta]:
    """An output of one token after the other, with its alternatives."""
    top = TokenLogprobs(-0.5, tuple((place, -1.5) for place in range(count)))
    return [TokenDelta([70], [top]) for _ in range(tokens)]


def test_log_probabilities_that_were_asked_for_are_reserved_before_anything_is_generated(
    api: LiveApi,
) -> None:
    assert api.complete(logprobs=20, max_tokens=3).status_code == 200
    api.generator.requests.clear()
    refused = api.complete(logprobs=20, max_tokens=4)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert api.generator.requests == []
    api.settle(lambda: in_flight(api) == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_a_limit_is_counted_as_it_grows(
    api: LiveApi, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Only one that is sent whole: a stream holds nothing."""
    monkeypatch.setattr("gateway.api.replies.reply.COUNTED_BYTES", 1)
    api.generator.script = lambda request: [
        *logprobs_of(20, 10),
        TokenDelta([], finish=FinishReason.LENGTH),
    ]
    response = api.chat(logprobs=True, top_logprobs=20, stream=stream)
    assert response.status_code == (200 if stream else 503)
    api.settle(lambda: in_flight(api) == 0)


def test_text_of_a_whole_answer_is_counted(api: LiveApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.api.replies.reply.COUNTED_BYTES", 1)
    api.generator.script = lambda request: [TokenDelta([70])] * 100
    assert api.complete(max_tokens=1000).status_code == 503
    api.settle(lambda: in_flight(api) == 0)
