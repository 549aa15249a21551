"""Responses that are kept in a real store: continued, retrieved, listed and deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.tokenizer import Tokenizer
from process.store.embedded_valkey import EmbeddedValkey
from protocol.errors import Overloaded
from tests.effort import times
from tests.unit.gateway.api.keeping_server import (
    THEIRS,
    TOOLS,
    UNKNOWN,
    ask,
    client_of,
    keeping_server,
    prompt_of,
)
from tests.unit.gateway.api_clients import CALL, SHORT_CALL, THINKING
from tests.unit.gateway.api_harness import MODEL, LiveApi


@pytest.fixture(scope="module")
def running_api(tools_checkpoint: Path, tools_tokenizer: Tokenizer) -> Iterator[LiveApi]:
    with (
        EmbeddedValkey() as valkey,
        keeping_server(tools_checkpoint, tools_tokenizer, valkey.url) as live,
    ):
        yield live


@pytest.fixture
def client(api: LiveApi) -> Iterator[openai.OpenAI]:
    with client_of(api) as each:
        yield each


def kept(api: LiveApi) -> float:
    return api.metric("baton_responses_kept_total")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_is_retrieved_as_it_was_and_deleted(client, api, is_streamed):
    api.says(THINKING + "I ask." + CALL)
    fields = {"tools": TOOLS, "metadata": {"a": "b"}, "instructions": "Be short"}
    answer = ask(client, stream=is_streamed, **fields)
    if is_streamed:
        *_, last = answer
        answer = last.response
    assert answer.store is True
    assert client.responses.retrieve(answer.id) == answer
    assert api.http.head(f"/v1/responses/{answer.id}").status_code == 200
    client.responses.delete(answer.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match=answer.id) as caught:
            call(answer.id)
        assert caught.value.code == "response_not_found"


def test_a_deleted_answer_says_so(client, api):
    answer = ask(client)
    shown = api.http.delete(f"/v1/responses/{answer.id}").json()
    assert shown == {"id": answer.id, "object": "response", "deleted": True}


def test_a_response_is_continued_without_input(client, api):
    api.says("It rains.")
    first = ask(client)
    api.says("A lot.")
    second = ask(client, [], previous_response_id=first.id)
    assert second.output_text == "A lot."
    conversation = (
        "<|start|>user\nSay it<|end|>\n<|start|>assistant\nIt rains.<|end|>\n<|start|>assistant\n"
    )
    assert prompt_of(api) == conversation
    counted = client.responses.input_tokens.count(input=[], previous_response_id=first.id)
    assert counted.input_tokens == len(api.generator.requests[-1].token_ids)
    api.says("It stops.")
    ask(client, "And?", previous_response_id=second.id)
    assert "It rains.<|end|>\n<|start|>assistant\nA lot.<|end|>\n<|start|>user\nAnd?" in prompt_of(
        api
    )


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_is_continued(client, api, is_streamed):
    api.says(THINKING + "I ask." + SHORT_CALL)
    first = ask(client, tools=TOOLS, instructions="Only once", stream=is_streamed)
    if is_streamed:
        *_, last = first
        first = last.response
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    api.says("It rains.")
    second = ask(client, [result], previous_response_id=first.id, instructions="Be kind")
    assert second.previous_response_id == first.id
    assert prompt_of(api) == (
        "<|start|>system\nBe kind<|end|>\n<|start|>user\nSay it<|end|>\n"
        "<|start|>assistant\n<think>Let me see</think>I ask."
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call><|end|>\n'
        f"<|start|>tool\nrain({call.call_id})<|end|>\n<|start|>assistant\n"
    )
    ask(client, "And?", previous_response_id=second.id)
    assert "It rains.<|end|>\n<|start|>user\nAnd?<|end|>" in prompt_of(api)
    assert "kind" not in prompt_of(api)
    length = len(api.generator.requests[-1].token_ids)
    counted = client.responses.input_tokens.count(input="And?", previous_response_id=second.id)
    assert counted.input_tokens == length


def test_one_response_is_continued_twice(client, api):
    first = ask(client)
    for word in ("one", "two"):
        ask(client, word, previous_response_id=first.id)
        assert prompt_of(api).count("<|start|>user") == 2
        assert prompt_of(api).endswith(f"<|start|>user\n{word}<|end|>\n<|start|>assistant\n")


def test_log_probabilities_are_kept_in_the_answer_and_not_in_the_history(client, api):
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    first = ask(client, **asked)
    assert client.responses.retrieve(first.id).output[0].content[0].logprobs
    second = ask(client, "And?", previous_response_id=first.id)
    items = client.responses.input_items.list(second.id).data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[1].content[0].logprobs is None


SAYINGS = {
    "text": "one two three",
    "thought": THINKING + "Hello",
    "call": "I ask." + SHORT_CALL,
    "silent call": SHORT_CALL,
    "two calls": THINKING + SHORT_CALL + CALL,
    "thought alone": THINKING,
}
PART = {"type": "input_text", "text": "part"}
ASKED = st.sampled_from(
    [
        "plain",
        [{"role": "user", "content": "Hi"}],
        [{"role": "user", "content": [PART, PART]}, {"role": "developer", "content": "Be kind"}],
        [{"role": "assistant", "content": "I said"}, {"role": "user", "content": [PART]}],
        [{"role": "user", "content": "x", "id": "m", "status": None, "unknown": None}],
        "results",
    ]
)


@given(st.lists(st.tuples(ASKED, st.sampled_from(sorted(SAYINGS))), min_size=1, max_size=4))
@settings(max_examples=times(12, 300))
def test_a_chain_renders_the_prompt_of_the_whole_conversation(running_api: LiveApi, turns):
    """Each turn is asked twice: after the one before by its id, and with all items at once."""
    api = running_api
    api.reset()
    items: list[object] = []
    previous = None
    for asked, saying in turns:
        calls = [each for each in items if each.get("type") == "function_call"]
        if asked == "results":
            own = [
                {"type": "function_call_output", "call_id": each["call_id"], "output": "rain"}
                for each in calls
            ] or "plain"
        else:
            own = asked
        items += [{"role": "user", "content": own}] if isinstance(own, str) else own
        api.says(SAYINGS[saying])
        api.generator.requests.clear()
        body = {"model": MODEL, "tools": TOOLS}
        continued = api.post(
            "/v1/responses", {**body, "input": own, "previous_response_id": previous}
        )
        assert continued.status_code == 200, continued.text
        whole = api.post("/v1/responses", {**body, "input": items, "store": False})
        assert whole.status_code == 200, whole.text
        chained, at_once = api.generator.requests
        assert chained.token_ids == at_once.token_ids
        previous = continued.json()["id"]
        items += continued.json()["output"]


def test_the_input_is_listed_in_pages(client, api):
    first = ask(client, "one")
    parts = [{"type": "input_text", "text": "two"}]
    second = ask(
        client,
        [{"role": "user", "content": parts, "id": "msg_own"}],
        previous_response_id=first.id,
    )
    shown = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [each.content[0].text for each in shown.data] == ["one", "Hello"]
    assert shown.has_more
    every = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [each.content[0].text for each in every] == ["one", "Hello", "two"]
    assert [each.type for each in every] == ["message"] * 3
    assert every[1].id == first.output[0].id
    assert every[2].id == "msg_own"
    newest_first = list(client.responses.input_items.list(second.id, limit=2))
    assert [each.id for each in newest_first] == [each.id for each in reversed(every)]
    page = f"/v1/responses/{second.id}/input_items"
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        refused = api.http.get(f"{page}?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_what_is_not_to_be_kept_is_not(client, api):
    before = kept(api)
    first = ask(client)
    second = ask(client, "And?", store=False, previous_response_id=first.id)
    assert (first.store, second.store) == (True, False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    client.responses.retrieve(first.id)
    assert kept(api) == before + 1


def test_another_key_finds_nothing(client, api):
    answer = ask(client)
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key=THEIRS, max_retries=0) as other:
        for call in (
            other.responses.retrieve,
            other.responses.delete,
            other.responses.cancel,
            other.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                call(answer.id)
        with pytest.raises(openai.BadRequestError) as caught:
            ask(other, previous_response_id=answer.id)
        assert caught.value.code == "previous_response_not_found"
    assert client.responses.retrieve(answer.id) == answer


@pytest.mark.parametrize("name", [UNKNOWN, "resp_1", "a:b", "ü"])
def test_a_previous_response_that_is_unknown(client, api, name):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, previous_response_id=name)
    error = caught.value
    assert (error.code, error.param) == ("previous_response_not_found", "previous_response_id")
    assert f"Previous response with id '{name}' not found." in error.message
    assert not api.generator.requests


def test_a_failed_response_is_kept_and_not_continued(client, api):
    steps = api.generator.script
    api.generator.script = lambda request: [*steps(request)[:1], Overloaded("gone")]
    *_, last = ask(client, stream=True)
    found = client.responses.retrieve(last.response.id)
    assert (found.status, found.error.message) == ("failed", "gone")
    with pytest.raises(openai.BadRequestError, match="is failed, and cannot be continued"):
        ask(client, previous_response_id=found.id)


def test_a_response_that_was_cut_off_is_continued(client, api):
    api.says("one two three")
    first = ask(client, max_output_tokens=2)
    assert first.status == client.responses.retrieve(first.id).status == "incomplete"
    ask(client, "Go on", previous_response_id=first.id)
    assert f"{first.output_text}<|end|>" in prompt_of(api)


def test_a_response_in_the_foreground_cannot_be_cancelled(client, api):
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(ask(client).id)


def test_a_kept_response_is_not_streamed(client, api):
    answer = ask(client)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(answer.id, stream=True)
    assert caught.value.param == "stream"
