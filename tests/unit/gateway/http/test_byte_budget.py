"""Bodies, fields and whole answers of all requests in flight share one budget of bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from httpx import Response

from gateway.api.context import ApiLimits
from gateway.http.byte_budget import ByteBudget
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ConfigError, Overloaded, TooManyRequests
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
    budget.take("a", 6)
    budget.check("b", 2)
    budget.retry_after_s = lambda: 7
    with pytest.raises(Overloaded, match="10 bytes") as caught:
        budget.take("b", 5)
    assert caught.value.retry_after_s == 7
    assert budget.in_flight == 6
    budget.give_back("a", 6)
    budget.take("b", 5)


def test_a_caller_may_hold_as_much_as_it_leaves_for_others() -> None:
    budget = ByteBudget(100)
    greedy = ["a", "b", "c", "d"]
    for _ in range(100):
        for each in greedy:
            with contextlib.suppress(TooManyRequests):
                budget.take(each, 1)
    with pytest.raises(TooManyRequests, match="requests hold 20 bytes"):
        budget.take("a", 1)
    assert budget.in_flight == 80, "each of four has a fifth; the last fifth is for the next caller"
    budget.take("e", 10)
    for each in greedy:
        budget.give_back(each, 20)
    budget.give_back("e", 10)
    budget.take("a", 50)
    with pytest.raises(TooManyRequests):
        budget.take("a", 1)


def test_a_caller_that_holds_nothing_is_forgotten() -> None:
    budget = ByteBudget(100)
    for num_bytes in (7, 0):
        budget.take("a", num_bytes)
        budget.give_back("a", num_bytes)
    assert (budget.in_flight, budget._held) == (0, {})


def test_what_is_given_back_counts_no_more() -> None:
    budget = ByteBudget(100)
    budget.take("other", 20)
    budget.take("a", 40)
    with pytest.raises(TooManyRequests, match="requests hold 40 bytes"):
        budget.take("a", 1)
    budget.give_back("a", 30)
    budget.take("a", 30)
    budget.give_back("a", 40)
    budget.give_back("other", 20)
    assert budget.in_flight == 0
    assert not budget._held, "nothing stays of callers that have left"


def test_a_request_that_is_alone_may_take_everything() -> None:
    budget = ByteBudget(100)
    budget.take("a", 60)
    budget.take("a", 40, own_bytes=60)
    assert budget.in_flight == 100


def posted(api: LiveApi, address: str, text: str = LARGE, is_chunked: bool = False) -> Response:
    """The answer to a completion from an address of this machine."""
    body = b'{"model": "%s", "prompt": "%s"}' % (MODEL.encode(), text.encode())
    content = iter([body[: len(body) // 2], body[len(body) // 2 :]]) if is_chunked else body
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(base_url=api.url, timeout=TIMEOUT_S, transport=transport) as client:
        return client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )


@pytest.mark.parametrize(("address", "status"), [("127.0.0.1", 429), ("127.0.0.2", 503)])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_without_room_is_refused_until_another_request_ends(
    api: LiveApi, address: str, status: int, is_chunked: bool
) -> None:
    """There is room for the caller that holds nothing yet, if the other one leaves any."""
    pause = Pause()
    api.generator.script = lambda request: [pause]
    text = LARGE if address == "127.0.0.1" else "x" * 7000
    first = threading.Thread(target=lambda: api.complete(text))
    first.start()
    api.generator.wait_active(1)
    assert 7000 < in_flight(api) < 9000, "the body and its fields"

    refused = posted(api, address, text[:4000] if status == 429 else text, is_chunked)
    assert refused.status_code == status
    assert refused.headers["retry-after"]
    code = "overloaded" if status == 503 else "rate_limit_exceeded"
    assert refused.json()["error"]["code"] == code
    assert in_flight(api) < 9000
    api.says("Hello")
    assert posted(api, "127.0.0.2", "Hi").status_code == 200

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
