"""Streams whose tokens make several events each: every event comes once, whichever was the last,
and however the tokens come again."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from protocol.messages import FinishReason
from router.requests.interface import GenerationRequest, TokenDelta
from tests.unit.gateway.api_clients import CALL, SCHEMA, SHORT_CALL, THINKING
from tests.unit.gateway.api_harness import MODEL, LiveApi, Step, token_steps

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOOL = {"name": "weather", "input_schema": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "x", "tools": [{"type": "function", "name": "weather"}]},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 150, "tools": [TOOL]},
}
TEXTS = {
    "text": "Hello wörld 你好 😀",
    "thoughts": f"{THINKING} \n Well.",
    "calls": f"{THINKING}I ask. {CALL}\n{SHORT_CALL} So?",
    "no call": "a <tool_call>{",
    "nothing": "",
}
Event = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def running_api(tools_api: LiveApi) -> LiveApi:
    return tools_api


def events_of(answer: httpx.Response) -> tuple[list[str], list[Event]]:
    """Ids and events of a stream, without the time when it ended."""
    assert answer.status_code == 200, answer.text
    ids: list[str] = []
    events: list[Event] = []
    for frame in answer.text.split("\n\n")[:-1]:
        id_line, name, data = frame.split("\n")
        ids.append(id_line.removeprefix("id: "))
        document = json.loads(data.removeprefix("data: "))
        document.get("response", {}).pop("completed_at", None)
        events.append((name.removeprefix("event: "), document))
    assert len(set(ids)) == len(ids)
    return ids, events


def says(api: LiveApi, text: str, size: int, finish: FinishReason, ends_apart: bool) -> None:
    """Every generation gives this text, `size` tokens a delta; an end by length perhaps later."""
    ids = api.tokenizer.encode(text, add_special_tokens=False)

    def script(request: GenerationRequest) -> list[Step]:
        steps = token_steps(request, ids, finish, api.tokenizer)
        joined = [_join(steps[at : at + size]) for at in range(0, len(steps), size)]
        last = joined[-1] if joined else TokenDelta([], None, finish, 2)
        if not ends_apart or last.finish is not FinishReason.LENGTH or not last.token_ids:
            return joined or [last]
        apart = TokenDelta([], None, FinishReason.LENGTH, 2)
        return [*joined[:-1], TokenDelta(last.token_ids, None, None, 2), apart]

    api.generator.script = script


def _join(deltas: list[TokenDelta]) -> TokenDelta:
    tokens = [token for delta in deltas for token in delta.token_ids]
    return TokenDelta(tokens, None, deltas[-1].finish, deltas[-1].cached_tokens)


@pytest.mark.parametrize("finish", list(FinishReason))
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_what_follows_is_the_rest(api: LiveApi, path: str, text: str, finish: FinishReason) -> None:
    body = {"model": MODEL, "stream": True, **BODIES[path]}
    says(api, TEXTS[text], 1, finish, ends_apart=False)
    ids, events = events_of(api.post(path, body))
    for number, last_id in enumerate(ids):
        says(api, TEXTS[text], 1 + number % 5, finish, ends_apart=number % 2 == 0)
        _, rest = events_of(api.post(path, body, **{"Last-Event-ID": last_id}))
        assert rest == events[number + 1 :]


@pytest.mark.parametrize("stop", ["rld", "Hello wörld", " 你"])
def test_a_stop_string_ends_it_at_the_same_place(api: LiveApi, stop: str) -> None:
    body = {"model": MODEL, "stream": True, **BODIES[MESSAGES], "stop_sequences": [stop]}
    says(api, TEXTS["text"], 1, FinishReason.STOP, ends_apart=False)
    ids, events = events_of(api.post(MESSAGES, body))
    assert events[-2][1]["delta"]["stop_sequence"] == stop
    for number, last_id in enumerate(ids):
        says(api, TEXTS["text"], 2 + number % 5, FinishReason.STOP, ends_apart=False)
        _, rest = events_of(api.post(MESSAGES, body, **{"Last-Event-ID": last_id}))
        assert rest == events[number + 1 :]


@pytest.mark.parametrize("ends_apart", [False, True])
def test_an_end_by_length_is_the_same_whenever_it_is_found(api: LiveApi, ends_apart: bool) -> None:
    """What was held back, because a stop string may have begun, comes by itself."""
    body = {"model": MODEL, "stream": True, **BODIES[MESSAGES], "stop_sequences": ["ox"]}
    says(api, "Hello", 1, FinishReason.LENGTH, ends_apart)
    ids, events = events_of(api.post(MESSAGES, body))
    texts = [each["delta"]["text"] for name, each in events if name == "content_block_delta"]
    assert texts[-1] == "o"
    for number, last_id in enumerate(ids):
        says(api, "Hello", 1 + number % 2, FinishReason.LENGTH, not ends_apart)
        _, rest = events_of(api.post(MESSAGES, body, **{"Last-Event-ID": last_id}))
        assert rest == events[number + 1 :]


def test_a_resumed_stream_may_be_resumed_again(api: LiveApi) -> None:
    body = {"model": MODEL, "stream": True, **BODIES[RESPONSES]}
    says(api, TEXTS["text"], 1, FinishReason.STOP, ends_apart=False)
    ids, events = events_of(api.post(RESPONSES, body))
    heard, last_id = events[:3], ids[2]
    while len(heard) < len(events):
        ids, rest = events_of(api.post(RESPONSES, body, **{"Last-Event-ID": last_id}))
        heard, last_id = heard + rest[:3], ids[min(2, len(ids) - 1)]
    assert heard == events
    lives = [request.life for request in api.generator.requests]
    assert lives == sorted(set(lives)), "each life is newer than all before"


def test_what_the_client_knows_counts_once(api: LiveApi) -> None:
    body = {"model": MODEL, "stream": True, **BODIES[RESPONSES]}
    ids, events = events_of(api.post(RESPONSES, body))
    counted = api.metric("baton_output_tokens_total")
    assert events_of(api.post(RESPONSES, body, **{"Last-Event-ID": ids[-1]})) == ([], [])
    assert api.metric("baton_output_tokens_total") == counted
    assert events[-1][1]["response"]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "alter",
    [
        lambda last: "7",
        lambda last: last.rpartition(".")[0],
        lambda last: last + "e",
        lambda last: last + ",3.4",
        lambda last: last.partition(":")[0] + ":1000.1",
        lambda last: last.translate(str.maketrans("_", "-")),
    ],
)
def test_an_id_that_was_not_given_out(api: LiveApi, path: str, alter: Any) -> None:
    body = {"model": MODEL, "stream": True, **BODIES[path]}
    ids, _ = events_of(api.post(path, body))
    answer = api.post(path, body, **{"Last-Event-ID": alter(ids[3])})
    assert answer.status_code == 400, answer.text
    assert "Last-Event-ID" in answer.json()["error"]["message"]


def test_an_id_is_of_one_endpoint_and_one_body(api: LiveApi) -> None:
    body = {"model": MODEL, "stream": True, **BODIES[RESPONSES]}
    ids, _ = events_of(api.post(RESPONSES, body))
    for path, other in (
        (RESPONSES, body | {"input": "y"}),
        (RESPONSES, body | {"stream": False}),
        (MESSAGES, {"model": MODEL, "stream": True, **BODIES[MESSAGES]}),
        ("/v1/completions", {"model": MODEL, "stream": True, "prompt": "x"}),
    ):
        assert api.post(path, other, **{"Last-Event-ID": ids[2]}).status_code == 400
