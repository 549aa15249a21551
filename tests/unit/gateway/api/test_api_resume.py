"""Streams that are resumed by the id of any of their events, however their tokens come again."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output.event_ids import Bookmark, StreamIdentity, resumed_identity
from protocol.errors import InvalidRequest
from protocol.messages import FinishReason
from router.requests.interface import GenerationRequest, TokenDelta
from tests.unit.gateway.api_harness import MODEL, Step, token_steps

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "Hello wörld, one two three. A stop string stops."


@dataclass(frozen=True)
class Sent:
    """One event as its client got it."""

    id: str
    document: dict

    @property
    def parts(self) -> list[tuple]:
        """What it adds to each choice, however it is cut."""
        return [
            (
                each["index"],
                each["text"] if "text" in each else each["delta"].get("content", ""),
                each.get("token_ids", []),
                _entries(each.get("logprobs")),
                each["finish_reason"],
            )
            for each in self.document["choices"]
        ]


def _entries(logprobs: dict | None) -> list:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], strict=True)
    )


def sent(answer: httpx.Response) -> list[Sent]:
    """The events of a stream, which ended in order."""
    assert answer.status_code == 200, answer.text
    *events, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [_event(each) for each in events]


def _event(text: str) -> Sent:
    id_line, data = text.split("\n")
    assert id_line.startswith("id: ")
    return Sent(id_line.removeprefix("id: "), json.loads(data.removeprefix("data: ")))


def whole(events: list[Sent]) -> dict[int, list]:
    """Everything that events say of each choice, joined."""
    joined: dict[int, list] = {}
    for index, *parts in itertools.chain.from_iterable(event.parts for event in events):
        known = joined.setdefault(index, ["", [], [], None])
        text, token_ids, logprobs, finish = parts
        assert known[3] is None, "nothing follows the end of a choice"
        joined[index] = [known[0] + text, known[1] + token_ids, known[2] + logprobs, finish]
    return joined


def says(api, text: str, size: int, finish: FinishReason = FinishReason.STOP) -> None:
    """Every generation gives this text, `size` tokens a delta."""
    ids = api.tokenizer.encode(text, add_special_tokens=False)

    def script(request: GenerationRequest) -> list[Step]:
        steps = token_steps(request, ids, finish, api.tokenizer)
        return [join(steps[at : at + size]) for at in range(0, len(steps), size)]

    api.generator.script = script


def join(deltas: list[TokenDelta]) -> TokenDelta:
    logprobs = [entry for delta in deltas for entry in delta.logprobs or []]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return TokenDelta(tokens, logprobs or None, deltas[-1].finish, deltas[-1].cached_tokens)


def body_of(path: str, **fields: object) -> dict[str, object]:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    return {"model": MODEL, "stream": True, "max_tokens": 60, **prompt, **fields}


FIELDS: dict[str, dict[str, object]] = {
    "plain": {},
    "token ids": {"return_token_ids": True},
    "choices": {"n": 3},
    "stop string": {"stop": ["never", "ne two th"]},
    "stop string, shown": {"stop": "stop string", "include_stop_str_in_output": True},
    "cut by length": {"max_tokens": 9, "min_tokens": 3},
    "usage": {"n": 2, "stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("kind", [*FIELDS, "logprobs"])
def test_the_rest_follows_whichever_event_was_the_last(api, path, kind):
    logprobs = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    fields = logprobs | {"stop": "ring st"} if kind == "logprobs" else FIELDS[kind]
    body = body_of(path, **fields)
    says(api, TEXT, size=1)
    events = sent(api.post(path, body))
    for number, last in enumerate(events):
        says(api, TEXT, size=1 + number % 4)
        rest = sent(api.post(path, body, **{"Last-Event-ID": last.id}))
        heard = [*events[: number + 1], *rest]
        assert whole(heard) == whole(events)
        assert {event.document["id"] for event in heard} == {events[0].document["id"]}
        assert {event.document["created"] for event in heard} == {events[0].document["created"]}
        usages = [event.document["usage"] for event in heard if event.document.get("usage")]
        assert [usage["completion_tokens"] for usage in usages] == [
            usage["completion_tokens"] for usage in [events[-1].document.get("usage")] if usage
        ]
        roles = [part.get("delta", {}).get("role") for e in rest for part in e.document["choices"]]
        begun = {part["index"] for e in events[: number + 1] for part in e.document["choices"]}
        new = {part["index"] for e in rest for part in e.document["choices"]} - begun
        assert len([role for role in roles if role]) == (len(new) if path == CHAT else 0)


def test_a_resumed_stream_may_be_resumed_again(api):
    body = body_of(COMPLETIONS)
    says(api, TEXT, size=1)
    events = sent(api.post(COMPLETIONS, body))
    heard, last = list(events[:2]), events[1].id
    while heard[-1].parts[0][-1] is None:
        rest = sent(api.post(COMPLETIONS, body, **{"Last-Event-ID": last}))
        heard += rest[:2]
        last = heard[-1].id
    assert whole(heard) == whole(events)
    lives = [request.life for request in api.generator.requests]
    assert lives == sorted(set(lives)), "each life is newer than all before"


def test_seeds_are_those_of_the_request_whichever_worker_serves_it(api):
    body = body_of(COMPLETIONS, n=2)
    events = sent(api.post(COMPLETIONS, body))
    api.post(COMPLETIONS, body, **{"Last-Event-ID": events[0].id})
    first, again = api.generator.requests[:2], api.generator.requests[2:]
    assert [each.request_id for each in first] == [each.request_id for each in again]
    assert [each.sampling.seed for each in first] == [each.sampling.seed for each in again]
    assert all(each.is_resumable for each in (*first, *again))


def test_a_choice_that_has_ended_is_not_run_again(api):
    body = body_of(COMPLETIONS, n=2, stream_options={"include_usage": True})
    events = sent(api.post(COMPLETIONS, body))
    ended = next(event for event in events if event.parts[0][-1])
    api.generator.requests.clear()
    rest = sent(api.post(COMPLETIONS, body, **{"Last-Event-ID": ended.id}))
    assert len(api.generator.requests) == 1
    assert rest[-1].document["usage"]["completion_tokens"] == 2 * (
        events[-1].document["usage"]["completion_tokens"] // 2
    )


def test_tokens_that_its_client_has_are_not_counted_again(api):
    body = body_of(COMPLETIONS)
    says(api, TEXT, size=1)
    at_first = api.metric("baton_output_tokens_total")
    events = sent(api.post(COMPLETIONS, body))
    before = api.metric("baton_output_tokens_total")
    known = int(events[4].id.rpartition(":")[2])
    sent(api.post(COMPLETIONS, body, **{"Last-Event-ID": events[4].id}))
    assert api.metric("baton_output_tokens_total") - before == before - at_first - known


def test_its_timing_comes_last_although_a_choice_had_ended_before(api):
    body = body_of(COMPLETIONS, n=2)
    events = sent(api.post(COMPLETIONS, body))
    ended = next(event for event in events if event.parts[0][-1])
    headers = {"Last-Event-ID": ended.id, "x-baton-timing": "1"}
    *rest, last = sent(api.post(COMPLETIONS, body, **headers))
    assert "baton" in last.document
    assert not any("baton" in event.document for event in rest)


@pytest.mark.parametrize(
    ("change", "says_why"),
    [
        ({"prompt": "another"}, "same body"),
        ({"stream": False}, "stream"),
    ],
)
def test_a_request_that_is_not_the_streams_own(api, change, says_why):
    body = body_of(COMPLETIONS)
    last = sent(api.post(COMPLETIONS, body))[1].id
    answer = api.post(COMPLETIONS, body | change, **{"Last-Event-ID": last})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Last-Event-ID"
    assert says_why in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "alter",
    [
        lambda last: "7",
        lambda last: last + ",3",
        lambda last: last.partition(":")[0] + ":1000",
        lambda last: last.replace("cmpl-", "chatcmpl-"),
        lambda last: last.replace(":", "é:"),
        lambda last: last.replace(".0.", ".1."),
        lambda last: "cmpl-" + "0" * 32 + last[37:],
    ],
)
def test_an_id_that_was_not_given_out(api, alter):
    body = body_of(COMPLETIONS)
    last = alter(sent(api.post(COMPLETIONS, body))[1].id)
    headers = {"Last-Event-ID": last.encode("latin-1")}
    answer = api.http.post(COMPLETIONS, json=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "Last-Event-ID"


@given(st.text(max_size=120) | st.from_regex(r"[a-z]{1,3}-[0-9a-f]{32}\.[0-9]\.[0-9]\..*"))
def test_no_text_is_taken_for_an_id(text):
    with pytest.raises(InvalidRequest):
        resumed_identity(text, b"key", b"digest", 0.0)


def test_pieces_of_any_size_are_split_where_the_client_stands():
    rng = random.Random(5)
    for _ in range(200):
        tokens = [rng.randrange(9) for _ in range(rng.randrange(1, 9))]
        finish = rng.choice([None, FinishReason.LENGTH])
        at = rng.randrange(1, 10)
        parts = TokenDelta(tokens, None, finish).split(at)
        assert [token for part in parts for token in part.token_ids] == tokens
        assert [part.finish for part in parts if part.finish] == ([finish] if finish else [])
        assert len(parts[0].token_ids) == min(at, len(tokens))
        assert len(parts) <= 2


def test_the_same_event_may_be_resumed_twice_and_each_is_a_life_of_its_own():
    identity = StreamIdentity("cmpl-" + "0" * 32, created=1000)
    last_id = Bookmark(identity, 1, b"key", b"digest").marked(b"").decode()[4:-1]
    lives = [resumed_identity(last_id, b"key", b"digest", now).life for now in (1000.0, 1002.5)]
    assert lives == [1, 2500]
