"""Responses in the background, streamed or not, by two routers that share a real store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import redis

from gateway.admission.gate import Gate
from gateway.api.openai_responses import background, kept_endpoints, memory
from gateway.api.replies import event_chunks
from gateway.text.tokenizer import Tokenizer
from process.store import response_records
from process.store.embedded_valkey import EmbeddedValkey
from protocol.errors import Overloaded
from tests.unit.gateway.api_harness import MODEL, TIMEOUT_S, Forever, LiveApi, Pause

MAX_INFLIGHT = 2
BEGIN = ["response.created", "response.queued", "response.in_progress"]
OPENED = ["response.output_item.added", "response.content_part.added"]
TEXT = "response.output_text.delta"
ENDED = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as running:
        yield running


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate(MAX_INFLIGHT, time.monotonic)


@pytest.fixture(scope="module")
def both_apis(
    valkey: EmbeddedValkey, checkpoint: Path, tokenizer: Tokenizer, gate: Gate
) -> Iterator[tuple[LiveApi, LiveApi]]:
    """Two routers; leases end only when a test ends them."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(response_records, "TIMEOUT_S", 60.0)
        patch.setattr(memory, "LEASE_S", 3600.0)
        patch.setattr(background, "LEASE_S", 3600.0)
        patch.setattr(background, "RENEW_S", 0.02)
        patch.setattr(kept_endpoints, "_LOOK_S", 0.01)
        made = [
            LiveApi(checkpoint, tokenizer, redis_url=valkey.url, **options)
            for options in ({"gate": gate}, {})
        ]
        yield tuple(stack.enter_context(each) for each in made)


@pytest.fixture(scope="module")
def running_api(both_apis: tuple[LiveApi, LiveApi]) -> LiveApi:
    return both_apis[0]


@pytest.fixture
def client(api: LiveApi) -> Iterator[openai.OpenAI]:
    """Of the router that runs what is asked for."""
    with client_of(api) as made:
        yield made


@pytest.fixture
def elsewhere(both_apis: tuple[LiveApi, LiveApi]) -> Iterator[openai.OpenAI]:
    """A client of the other router, with the same key."""
    with client_of(both_apis[1]) as made:
        yield made


def client_of(api: LiveApi) -> openai.OpenAI:
    url = f"{api.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S)


def begin(client: openai.OpenAI, **fields):
    answer = client.responses.create(model=MODEL, input="Say it", background=True, **fields)
    assert (answer.status, answer.background, answer.store) == ("queued", True, True)
    assert answer.output == []
    return answer


def settled(api: LiveApi, client: openai.OpenAI, response_id: str):
    """The response once it runs no more."""
    api.settle(
        lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress")
    )
    return client.responses.retrieve(response_id)


@pytest.fixture
def paused() -> Iterator[Callable[[LiveApi], Pause]]:
    """Makes generations wait after their first token, at most until the test has ended."""
    made: list[Pause] = []

    def start(api: LiveApi) -> Pause:
        pause, steps = Pause(), api.generator.script
        api.generator.script = lambda request: [*(s := steps(request))[:1], pause, *s[1:]]
        made.append(pause)
        return pause

    yield start
    for each in made:
        each.end()


def endless(api: LiveApi) -> None:
    steps = api.generator.script
    api.generator.script = lambda request: [*steps(request)[:1], Forever()]


def streamed(client: openai.OpenAI, **fields: Any) -> openai.Stream[Any]:
    return client.responses.create(
        model=MODEL, input="Say it", background=True, stream=True, **fields
    )


def at_rest(api: LiveApi) -> None:
    """Nothing runs, and what ran has given everything back."""
    api.settle(lambda: api.metric("baton_responses_in_background") == 0)
    api.settle(lambda: api.metric("baton_http_bytes_in_flight") == 0)


def test_it_runs_without_its_client_and_can_be_continued(client, elsewhere, api, paused):
    pause = paused(api)
    began = begin(client, metadata={"a": "b"})
    client.close()
    api.settle(lambda: elsewhere.responses.retrieve(began.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="in_progress, and cannot be continued"):
        elsewhere.responses.create(model=MODEL, input="x", previous_response_id=began.id)
    pause.end()
    ended = settled(api, elsewhere, began.id)
    assert (ended.status, ended.output_text) == ("completed", "Hello")
    assert ended.usage.output_tokens == 2
    assert (ended.id, ended.created_at, ended.metadata) == (began.id, began.created_at, {"a": "b"})
    assert elsewhere.responses.input_items.list(ended.id).data[0].content[0].text == "Say it"
    with client_of(api) as again:
        again.responses.create(model=MODEL, input="x", previous_response_id=began.id)
    assert "Hello" in api.tokenizer.decode(api.generator.requests[-1].token_ids)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_it_is_cancelled_at_any_router(client, elsewhere, api, is_elsewhere):
    endless(api)
    began = begin(client)
    api.generator.wait_active(1)
    where = elsewhere if is_elsewhere else client
    for _ in range(2):
        assert where.responses.cancel(began.id).status == "cancelled"
    api.generator.wait_idle()
    for each in (client, elsewhere):
        assert each.responses.retrieve(began.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled, and cannot be continued"):
        client.responses.create(model=MODEL, input="x", previous_response_id=began.id)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_deleting_it_ends_it(client, elsewhere, api, is_elsewhere):
    endless(api)
    began = begin(client)
    api.generator.wait_active(1)
    (elsewhere if is_elsewhere else client).responses.delete(began.id)
    api.generator.wait_idle()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(began.id)


def test_one_that_has_ended_is_not_cancelled(client, api):
    ended = settled(api, client, begin(client).id)
    assert client.responses.cancel(ended.id) == ended


def test_a_failure_is_kept(client, api):
    steps = api.generator.script
    api.generator.script = lambda request: [*steps(request)[:1], Overloaded("gone")]
    ended = settled(api, client, begin(client).id)
    assert (ended.status, ended.error.code) == ("failed", "server_error")
    assert ended.error.message == "gone"


def test_it_is_incomplete_at_its_limit(client, api):
    api.says("one two three")
    ended = settled(api, client, begin(client, max_output_tokens=2).id)
    assert (ended.status, ended.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_it_has_failed_if_its_router_died(client, elsewhere, api, valkey):
    """Its lease has ended at one look; the router that runs it after all gives it up."""
    endless(api)
    began = begin(client)

    def is_found_lost() -> bool:
        with redis.Redis.from_url(valkey.url) as store:
            for lease in store.scan_iter(f"*:lease:*{began.id}"):
                store.delete(lease)
        return elsewhere.responses.retrieve(began.id).status == "failed"

    api.settle(is_found_lost)
    api.generator.wait_idle()
    api.settle(lambda: api.metric("baton_responses_in_background") == 0)
    found = client.responses.retrieve(began.id)
    assert found.status == "failed"
    assert "went away" in found.error.message


def test_it_counts_at_the_gate_until_it_ends(client, api, gate, paused):
    pause = paused(api)
    began = [begin(client) for _ in range(MAX_INFLIGHT)]
    assert api.metric("baton_responses_in_background") == MAX_INFLIGHT
    assert gate.in_flight == MAX_INFLIGHT
    with pytest.raises(openai.InternalServerError, match="the most that this router allows"):
        client.responses.create(model=MODEL, input="x", background=True)
    pause.end()
    for each in began:
        settled(api, client, each.id)
    api.settle(lambda: gate.in_flight == 0)
    api.settle(lambda: api.metric("baton_http_bytes_in_flight") == 0)


def test_what_contradicts_it_is_refused(client, api):
    for is_streamed in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(
                model=MODEL, input="x", background=True, store=False, stream=is_streamed
            )
        assert caught.value.param == "background"
    assert not api.generator.requests


def test_what_is_too_large_to_be_kept_is_refused(client, api, monkeypatch):
    monkeypatch.setattr(memory, "MAX_RECORD_BYTES", 200)
    with pytest.raises(openai.BadRequestError, match="is not kept") as caught:
        client.responses.create(model=MODEL, input="x", background=True)
    assert caught.value.param == "background"
    assert not api.generator.requests


def test_an_answer_that_grew_too_large_has_failed(client, api, monkeypatch, paused):
    pause = paused(api)
    began = begin(client)
    monkeypatch.setattr(memory, "MAX_RECORD_BYTES", 200)
    pause.end()
    api.settle(lambda: api.metric("baton_responses_in_background") == 0)
    monkeypatch.undo()
    ended = client.responses.retrieve(began.id)
    assert (ended.status, ended.output) == ("failed", [])
    assert "too large" in ended.error.message


def test_its_events_come_while_it_runs_and_are_kept_behind_it(client, elsewhere, api, gate, paused):
    api.says("one two three")
    pause = paused(api)
    stream = streamed(client)
    first = [next(stream) for _ in range(6)]
    assert [each.type for each in first] == [*BEGIN, *OPENED, TEXT]
    assert [each.response.status for each in first[:3]] == ["queued", "queued", "in_progress"]
    pause.end()
    events = [*first, *stream]
    assert [each.type for each in events if each.type != TEXT] == [*BEGIN, *OPENED, *ENDED]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    text = "".join(each.delta for each in events if each.type == TEXT)
    assert text == "one two three" == events[-1].response.output_text
    at_rest(api)
    assert gate.in_flight == 0
    for each in (client, elsewhere):
        again = each.responses.retrieve(events[0].response.id, stream=True)
        assert list(again) == events
        assert each.responses.retrieve(events[0].response.id) == events[-1].response


def test_a_client_that_left_comes_back_for_the_rest(client, elsewhere, api, paused):
    api.says("one two three")
    pause = paused(api)
    with streamed(client) as stream:
        response_id = next(stream).response.id
        place = next(stream).sequence_number
    api.generator.wait_active(1)
    back = client.responses.retrieve(response_id, stream=True, starting_after=place)
    assert next(back).type == "response.in_progress"
    far = elsewhere.responses.retrieve(response_id, stream=True, starting_after=place)
    pause.end()
    rest = list(back)
    assert rest[-1].response.output_text == "one two three"
    assert list(far)[1:] == rest
    last = rest[-1].sequence_number
    assert list(elsewhere.responses.retrieve(response_id, stream=True, starting_after=last)) == []


def test_events_that_are_written_in_pieces_are_kept_whole(client, elsewhere, api, monkeypatch):
    monkeypatch.setattr(event_chunks, "MAX_PIECE_BYTES", 101)
    api.says("one two three")
    events = list(streamed(client, include=["message.output_text.logprobs"], top_logprobs=2))
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert [each.type for each in events if each.type != TEXT] == [*BEGIN, *OPENED, *ENDED]
    assert events[-1].response.output_text == "one two three"
    at_rest(api)
    again = elsewhere.responses.retrieve(events[0].response.id, stream=True)
    assert list(again) == events


def test_a_failure_is_its_last_event(client, elsewhere, api):
    steps = api.generator.script
    api.generator.script = lambda request: [*steps(request)[:1], Overloaded("gone")]
    events = list(streamed(client))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "gone"
    at_rest(api)
    assert list(elsewhere.responses.retrieve(events[0].response.id, stream=True)) == events


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_its_stream_ends_if_it_is_cancelled(client, elsewhere, api, is_elsewhere):
    endless(api)
    stream = streamed(client)
    response_id = next(stream).response.id
    api.generator.wait_active(1)
    (elsewhere if is_elsewhere else client).responses.cancel(response_id)
    api.generator.wait_idle()
    assert {each.type for each in stream}.isdisjoint(ENDED)
    at_rest(api)
    for each in (client, elsewhere):
        assert list(each.responses.retrieve(response_id, stream=True)) == []


def test_what_was_lost_with_its_router_has_failed(client, elsewhere, api, valkey):
    endless(api)
    stream = streamed(client)
    response_id = next(stream).response.id

    def is_found_lost() -> bool:
        with redis.Redis.from_url(valkey.url) as store:
            for lease in store.scan_iter(f"*:lease:*{response_id}"):
                store.delete(lease)
        return elsewhere.responses.retrieve(response_id).status == "failed"

    api.settle(is_found_lost)
    [lost] = elsewhere.responses.retrieve(response_id, stream=True, starting_after=3)
    assert (lost.type, lost.sequence_number) == ("response.failed", 4)
    assert "went away" in lost.response.error.message
    at_rest(api)
    stream.close()


def test_events_that_are_too_many_to_be_kept_are_refused(client, api, monkeypatch, paused):
    pause = paused(api)
    stream = streamed(client)
    response_id = next(stream).response.id
    monkeypatch.setattr(memory, "MAX_RECORD_BYTES", 3000)
    pause.end()
    assert list(stream)[-1].response.output_text == "Hello"
    at_rest(api)
    with pytest.raises(openai.BadRequestError, match="more events than are kept") as caught:
        client.responses.retrieve(response_id, stream=True)
    assert caught.value.param == "stream"
    assert client.responses.retrieve(response_id).output_text == "Hello"


def test_only_what_was_made_as_a_stream_in_the_background_is_streamed_again(client, api):
    made = [
        client.responses.create(model=MODEL, input="x"),
        client.responses.create(model=MODEL, input="x", background=True),
    ]
    at_rest(api)
    for each in made:
        with pytest.raises(openai.BadRequestError, match="created with 'background'") as caught:
            client.responses.retrieve(each.id, stream=True)
        assert caught.value.param == "stream"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_" + "0" * 32, stream=True)


@pytest.mark.parametrize("place", ["x", "-1", ""])
def test_a_place_that_is_no_number_is_refused(client, api, place):
    response_id = next(iter(streamed(client))).response.id
    at_rest(api)
    path = f"/v1/responses/{response_id}?stream=true&starting_after={place}"
    answer = api.http.get(path, headers={"authorization": "Bearer none"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "starting_after"
