"""Long answers arrive in pieces, and say the same as short ones; what they may hold is bounded."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.api import choice_planner
from gateway.api.openai import logprobs as openai_logprobs
from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai.completion_request import CompletionRequest
from gateway.api.replies import reply
from gateway.api.strict_model import MAX_TOKEN_IDS
from gateway.api.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.output.choices import Choice, run_choices
from gateway.output.output_text import TextDelta
from protocol.messages import FinishReason
from router.requests.interface import TokenDelta
from tests.unit.gateway.api_harness import MODEL, LiveApi, events_of

PROMPT = [70 + number % 20 for number in range(150)]
OUTPUT = 40
CHAT = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (
        "/v1/completions",
        {"prompt": PROMPT, "prompt_logprobs": 20, "logprobs": 20, "echo": True, "n": 2},
    ),
    "ids": ("/v1/completions", {"prompt": PROMPT, "return_token_ids": True, "logprobs": 3}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 20}),
    "chat's prompt": ("/v1/chat/completions", {"messages": CHAT, "prompt_logprobs": 20}),
    "responses": (
        "/v1/responses",
        {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 20},
    ),
}


def fields_of(name: str) -> tuple[str, dict[str, Any]]:
    path, fields = BODIES[name]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return path, {"model": MODEL, limit: OUTPUT, **fields}


def without_names(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer without ids and times, which differ between any two."""
    own = ("id", "created", "created_at", "completed_at")
    kept = {key: value for key, value in answer.items() if key not in own}
    for item in kept.get("output", ()):
        item.pop("id")
    return kept


@pytest.fixture
def talkative(api: LiveApi) -> LiveApi:
    api.says("one two three " * 30, FinishReason.LENGTH)
    return api


@pytest.mark.parametrize("name", BODIES)
def test_in_pieces_an_answer_is_the_same(
    talkative: LiveApi, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, body = fields_of(name)
    monkeypatch.setattr(reply, "MAX_INLINE_VALUES", 10**9)
    whole = talkative.post(path, body)
    assert "content-length" in whole.headers
    monkeypatch.setattr(reply, "MAX_INLINE_VALUES", 0)
    monkeypatch.setattr(reply, "MAX_PIECE_BYTES", 100)
    monkeypatch.setattr("gateway.api.replies.json_pieces.SLICE_VALUES", 50)
    timing = {"x-baton-timing": "1"}
    pieces = talkative.post(path, body, **timing)
    assert pieces.headers["transfer-encoding"] == "chunked"
    assert pieces.headers["content-type"] == "application/json"
    assert pieces.headers["x-baton-request-id"]
    answer = pieces.json()
    assert answer.pop("baton") == {"choices": []}
    assert without_names(answer) == without_names(whole.json())


@pytest.mark.parametrize("name", BODIES)
def test_long_answers_are_made_in_threads_and_short_ones_at_once(
    talkative: LiveApi, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    threads: set[str] = set()
    encode = openai_logprobs._token_text

    def noting(data: bytes) -> str:
        threads.add(threading.current_thread().name)
        return encode(data)

    monkeypatch.setattr(openai_logprobs, "_token_text", noting)
    path, body = fields_of(name)
    monkeypatch.setattr(reply, "MAX_INLINE_VALUES", 10)
    assert talkative.post(path, body).status_code == 200
    assert threads
    assert all(each.startswith("tokenizer") for each in threads)
    threads.clear()
    monkeypatch.setattr(reply, "MAX_INLINE_VALUES", 10**9)
    assert talkative.post(path, body).status_code == 200
    assert not any(each.startswith("tokenizer") for each in threads)


def test_an_error_before_the_first_piece_has_its_own_status(
    talkative: LiveApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError("bug")

    monkeypatch.setattr(openai_logprobs, "_token_text", fail)
    path, body = fields_of("chat")
    assert talkative.post(path, body).status_code == 500


@pytest.mark.parametrize("name", ["completions", "chat's prompt"])
def test_a_stream_s_long_chunk_comes_in_pieces_and_with_its_usage(
    talkative: LiveApi, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, body = fields_of(name)
    whole = talkative.post(path, body).json()
    monkeypatch.setattr(reply, "MAX_PIECE_BYTES", 100)
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = talkative.post(path, {**body, "stream": True, "stream_options": options})
    events = events_of(streamed.text)
    assert all(each["usage"]["prompt_tokens"] > 0 for each in events)  # type: ignore[index]
    if "prompt_logprobs" in whole:
        told = [each["prompt_logprobs"] for each in events if "prompt_logprobs" in each]
        assert told == [whole["prompt_logprobs"]]
        return
    for choice in whole["choices"]:
        parts = [
            part
            for each in events
            for part in each["choices"]  # type: ignore[attr-defined]
            if part["index"] == choice["index"]
        ]
        assert [part["prompt_logprobs"] for part in parts if "prompt_logprobs" in part] == [
            choice["prompt_logprobs"]
        ]
        for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            told = [item for part in parts for item in part["logprobs"][column]]
            assert told == choice["logprobs"][column]


def test_the_end_of_a_response_s_stream_is_made_in_a_thread(
    talkative: LiveApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = fields_of("responses")
    whole = talkative.post(path, body).json()
    monkeypatch.setattr(reply, "MAX_PIECE_BYTES", 100)
    text = talkative.post(path, {**body, "stream": True}).text
    last = text.strip().split("\n\n")[-1]
    assert "event: response.incomplete" in last
    shown = whole["output"][0]["content"][0]["logprobs"]
    assert len(shown) == OUTPUT
    assert last.count('"top_logprobs":[{') == OUTPUT


def test_what_the_end_of_a_stream_repeats_has_a_limit_of_its_own(
    api: LiveApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice_planner, "MAX_REPEATED_VALUES", 210)
    path, body = fields_of("responses")
    for stream in (False, True):
        refused = api.post(path, {**body, "max_output_tokens": 11, "stream": stream})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "top_logprobs"
        assert api.post(path, {**body, "max_output_tokens": 10, "stream": stream}).is_success
    api.generator.requests.clear()
    assert api.post(path, {**body, "max_output_tokens": None, "stream": True}).is_success
    assert [each.sampling.max_tokens for each in api.generator.requests] == [10]


def test_prompts_times_sequences_have_a_limit(
    api: LiveApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice_planner, "MAX_STARTED_TOKENS", 300)
    assert api.complete(PROMPT, n=2).status_code == 200
    refused = api.complete(PROMPT, n=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def test_values_have_a_higher_limit_where_token_ids_are_taken() -> None:
    assert CompletionRequest.max_values > MAX_TOKEN_IDS
    assert DetokenizeRequest.max_values > MAX_TOKEN_IDS
    assert ChatRequest.max_values == TokenizeRequest.max_values < MAX_TOKEN_IDS


async def test_others_get_their_turn_between_two_starts() -> None:
    order: list[str] = []

    class Noting:
        async def generate(self, request: object, sink: Any) -> None:
            order.append("start")
            sink.take(TokenDelta([], finish=FinishReason.LENGTH))

    class Sink:
        is_full = False

        async def wait_room(self) -> None: ...
        def take(self, choice: Choice, delta: object) -> None: ...

    async def other() -> None:
        for _ in range(3):
            order.append("other")
            await asyncio.sleep(0)

    choices = [_choice(number) for number in range(3)]
    beside = asyncio.create_task(other())
    await run_choices(Noting(), choices, Sink(), lambda choice: _Probe())  # type: ignore[arg-type, return-value]
    await beside
    assert order[:4] in (["other", "start"] * 2, ["start", "other"] * 2)


class _Probe:
    def observe(self, *_: object) -> None: ...


class _Output:
    def push(self, delta: TokenDelta) -> Any:
        return TextDelta("", [], finish=delta.finish)


def _choice(index: int) -> Any:
    return SimpleNamespace(
        index=index,
        is_echo_only=False,
        known=SimpleNamespace(num_tokens=0),
        by_token=False,
        request=None,
        output=_Output(),
    )
