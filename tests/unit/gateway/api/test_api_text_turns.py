"""A flood of texts from one key delays another key's text by about one job, on every endpoint."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from gateway.admission.api_keys import KeyRing, hash_key
from gateway.api.context import ApiLimits
from gateway.http.access import AccessRules
from gateway.text.tokenizer import Tokenizer
from gateway.text.word_table import MAX_TEXT_CHARS
from tests.effort import some
from tests.unit.gateway.api_harness import MODEL, TIMEOUT_S, LiveApi

FLOOD, OTHER = (f"baton-{letter * 43}" for letter in "ab")
THREADS = 2
LONG = "hello world " * (MAX_TEXT_CHARS // 10)
"""Too long for the table of words, so that a thread encodes it."""


class Held:
    """Encodings that wait until a test lets one go; `order` has the first word of each."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self._go = threading.Semaphore(0)
        self._began = threading.Condition()
        original = tokenizer.encode_parts

        def encode_parts(parts, add_special_tokens):
            marks = [name for name in ("flood", "other", "gone") if name in "".join(parts)]
            if not marks:
                return original(parts, add_special_tokens)
            with self._began:
                self.order += marks
                self._began.notify_all()
            assert self._go.acquire(timeout=TIMEOUT_S)
            return original(parts, add_special_tokens)

        monkeypatch.setattr(tokenizer, "encode_parts", encode_parts)

    def let_go(self, count: int = 1) -> None:
        self._go.release(count)

    def wait(self, count: int) -> None:
        """Until so many encodings have begun."""
        with self._began:
            assert self._began.wait_for(lambda: len(self.order) >= count, TIMEOUT_S), self.order


@pytest.fixture(scope="module")
def running_api(checkpoint: Path) -> Iterator[LiveApi]:
    tokenizer = Tokenizer(checkpoint, threads=THREADS)
    ring = KeyRing([f"{hash_key(FLOOD)} name=flood", f"{hash_key(OTHER)} name=other"])
    rules = AccessRules(api=ring, salt=b"the cluster's secret")
    limits = ApiLimits()
    with LiveApi(checkpoint, tokenizer, limits, max_context=100_000, rules=rules) as live:
        yield live
    tokenizer.close()


@pytest.fixture
def held(api: LiveApi, monkeypatch: pytest.MonkeyPatch) -> Held:
    api.http.headers["authorization"] = f"Bearer {OTHER}"
    return Held(api.tokenizer, monkeypatch)


def body_for(path: str, text: str) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    bodies: dict[str, dict[str, object]] = {
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
        "/v1/responses": {"input": text},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": messages},
        "/v1/responses/input_tokens": {"input": text},
        "/tokenize": {"prompt": text},
    }
    return {"model": MODEL} | bodies[path]


PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    "/tokenize",
]


def ask(api: LiveApi, key: str, path: str, name: str) -> httpx.Response:
    body = body_for(path, f"{name} {LONG}")
    return httpx.post(f"{api.url}{path}", json=body, headers={"x-api-key": key}, timeout=TIMEOUT_S)


@pytest.mark.parametrize("path", some(PATHS, 3))
def test_a_flood_of_one_key_delays_another_by_about_one_job(
    api: LiveApi, held: Held, path: str
) -> None:
    flood: list[Future[httpx.Response]] = []
    with ThreadPoolExecutor(12) as pool:
        flood += [pool.submit(ask, api, FLOOD, path, "flood") for _ in range(8)]
        held.wait(THREADS)
        api.settle(lambda: waiting(api, path) == 8)
        other = pool.submit(ask, api, OTHER, path, "other")
        api.settle(lambda: waiting(api, path) == 9)
        held.let_go()
        held.wait(THREADS + 1)
        held.let_go(100)
        assert other.result().status_code == 200
        assert {each.result().status_code for each in flood} == {200}
    assert held.order[THREADS] == "other", "it takes the first place that becomes free"


def waiting(api: LiveApi, path: str) -> float:
    return api.metric("baton_http_requests_in_flight", endpoint=path)


def test_a_client_that_leaves_takes_its_waiting_text_with_it(api: LiveApi, held: Held) -> None:
    path = "/tokenize"
    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(ask, api, OTHER, path, "other") for _ in range(THREADS)]
        held.wait(THREADS)
        body = json.dumps(body_for(path, f"gone {LONG}")).encode()
        with socket.create_connection(("127.0.0.1", api.port), timeout=TIMEOUT_S) as client:
            client.sendall(
                f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {OTHER}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            api.settle(lambda: waiting(api, path) == THREADS + 1)
        api.settle(lambda: waiting(api, path) == THREADS)
        held.let_go(100)
        assert [each.result().status_code for each in running] == [200] * THREADS
    assert held.order == ["other"] * THREADS
    assert api.metric("baton_http_requests_total", endpoint=path, status="499") == 1
