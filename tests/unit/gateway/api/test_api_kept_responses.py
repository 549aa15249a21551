"""Responses that are kept in a real store: continued, retrieved, listed and deleted."""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.api_keys import KeyRing, hash_key
from gateway.api.openai_responses import memory
from gateway.http.access import AccessRules
from gateway.http.byte_budget import ByteBudget
from gateway.http.request_scope import RequestRecord
from gateway.text.tokenizer import Tokenizer
from process.store import response_records
from process.store.embedded_valkey import EmbeddedValkey
from protocol.errors import Overloaded
from tests.effort import times
from tests.unit.gateway.api_clients import CALL, SCHEMA, SHORT_CALL, THINKING
from tests.unit.gateway.api_harness import MODEL, TIMEOUT_S, LiveApi

TOOLS = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
OURS, THEIRS = (f"baton-{letter * 43}" for letter in "ab")
UNKNOWN = "resp_" + "0" * 32
MOST_CONTEXT = 100_000


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as running:
        yield running


@pytest.fixture(scope="module")
def running_api(
    valkey: EmbeddedValkey, tools_checkpoint: Path, tools_tokenizer: Tokenizer
) -> Iterator[LiveApi]:
    """A server with two keys that keeps responses."""
    rules = AccessRules(api=KeyRing([hash_key(OURS), hash_key(THEIRS)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(response_records, "TIMEOUT_S", 60.0)  # a busy machine may take long
        with LiveApi(
            tools_checkpoint,
            tools_tokenizer,
            max_context=MOST_CONTEXT,
            rules=rules,
            redis_url=valkey.url,
        ) as live:
            live.http.headers["authorization"] = f"Bearer {OURS}"
            yield live


@pytest.fixture(autouse=True)
def quick_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LOOKS_S", (0.001,))


OTHER_SHAPES = (
    b"7", b"null", b"{}", b"[7]", b"[{}]", b"\xff", b"[" * 10_000, b'[{"type": 5}]',
    b'[{"type": "message", "content": "x"}]', b'[{"type": "message", "content": [{}]}]',
    b'{"status": "odd", "output": []}', b'{"status": "completed", "output": [7]}',
)  # fmt: skip


@pytest.fixture
def client(api: LiveApi) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{api.url}/v1", api_key=OURS, max_retries=0, timeout=TIMEOUT_S
    ) as each:
        yield each


def ask(client: openai.OpenAI, said: object = "Say it", **fields):
    return client.responses.create(**{"model": MODEL, "input": said, **fields})


def prompt_of(api: LiveApi) -> str:
    return api.tokenizer.decode(api.generator.requests[-1].token_ids, False)


def kept(api: LiveApi) -> float:
    return api.metric("baton_responses_kept_total")


def not_kept(api: LiveApi, reason: str) -> float:
    return api.metric("baton_responses_not_kept_total", reason=reason)


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


def test_what_is_too_large_is_named_and_counted(client, api, monkeypatch):
    monkeypatch.setattr(memory, "MAX_RECORD_BYTES", 3000)
    before = not_kept(api, "too_large")
    raw = client.responses.with_raw_response.create(model=MODEL, input="x" * 4000)
    assert raw.headers["x-baton-ignored"] == "store"
    assert raw.parse().store is False
    api.says("word " * 1000)
    answer = ask(client)
    assert answer.store is True
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    assert not_kept(api, "too_large") == before + 2


def test_what_is_read_from_the_store_counts_as_the_requests_memory(client, api, monkeypatch):
    answer = ask(client, "x" * 5000)
    held: list[int] = []
    take = RequestRecord.hold
    monkeypatch.setattr(
        RequestRecord, "hold", lambda self, num: (held.append(num), take(self, num))[1]
    )
    ask(client, "y", previous_response_id=answer.id)
    assert max(held) > 5000
    held.clear()
    client.responses.input_items.list(answer.id)
    assert max(held) > 5000
    api.settle(lambda: api.metric("baton_http_bytes_in_flight") == 0)


def test_no_more_waits_for_the_store_than_fits(client, api, monkeypatch):
    monkeypatch.setattr(api.runs.memory, "_pending", ByteBudget(10))
    before = not_kept(api, "backlog")
    ask(client)
    api.settle(lambda: not_kept(api, "backlog") == before + 1)


def test_what_waits_of_one_owner_leaves_room_for_others(client, api, monkeypatch):
    """One key floods while the store is slow; another key's response is kept all the same."""
    is_open = threading.Event()
    put = api.runs.memory.records.put

    async def put_later(*args: object) -> None:
        await asyncio.to_thread(is_open.wait, TIMEOUT_S)
        await put(*args)

    monkeypatch.setattr(api.runs.memory.records, "put", put_later)
    monkeypatch.setattr(api.runs.memory, "_pending", ByteBudget(100_000))
    before = not_kept(api, "backlog")
    flood = [ask(client) for _ in range(30)]
    api.settle(lambda: not_kept(api, "backlog") > before)
    refused = not_kept(api, "backlog") - before
    other = ask(client.with_options(api_key=THEIRS))
    is_open.set()
    assert client.with_options(api_key=THEIRS).responses.retrieve(other.id) == other
    assert client.responses.retrieve(flood[0].id) == flood[0]
    assert 5 < refused < 30, "the flood keeps about half of what fits"


def test_an_unexpected_error_while_a_response_is_kept_is_counted_and_logged(
    client, api, monkeypatch, caplog
):
    async def fail(record: memory.ResponseRecord, standing: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(api.runs.memory, "_packed", fail)
    before = not_kept(api, "error")
    answer = ask(client)
    api.settle(lambda: not_kept(api, "error") == before + 1)
    assert f"response {answer.id} could not be kept" in caplog.text


def record_in(store: redis.Redis, answer_id: str) -> bytes:
    """The key of a record, which is written behind the answer."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        for key in store.scan_iter(f"*:record:*{answer_id}"):
            return key
        time.sleep(0.01)
    raise TimeoutError(f"{answer_id} did not reach the store")


def test_a_record_that_nobody_can_read_is_not_found(client, api, valkey):
    answer = ask(client)
    assert client.responses.retrieve(answer.id) == answer
    with redis.Redis.from_url(valkey.url) as store:
        record = record_in(store, answer.id)
        store.hset(record, "answer", b"\x00bad")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


@pytest.mark.parametrize("field", ["answer", "input"])
def test_a_record_of_another_shape_is_not_found(client, valkey, field: str):
    kept = ask(client)
    with redis.Redis.from_url(valkey.url) as store:
        record = record_in(store, kept.id)
        for shape in OTHER_SHAPES:
            store.hset(record, field, zlib.compress(shape))
            for call in (client.responses.retrieve, client.responses.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    call(kept.id)
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model=MODEL, input="Hi", previous_response_id=kept.id)
        store.delete(record)
        store.set(record, b"no hash")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(kept.id)


@pytest.fixture
def forgetful_api(
    tools_checkpoint: Path, tools_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LiveApi]:
    """A server whose store went away, and is not asked again after the first failure."""
    monkeypatch.setattr(response_records, "BACKOFF_MAX_S", 3600.0)
    with EmbeddedValkey() as gone:
        url = gone.url
    with LiveApi(tools_checkpoint, tools_tokenizer, redis_url=url) as live:
        live.reset()
        yield live


def test_without_the_store_only_what_needs_it_fails(forgetful_api: LiveApi):
    api, body = forgetful_api, {"model": MODEL, "input": "Hi"}
    first = api.post("/v1/responses", body)
    assert first.status_code == 200
    api.settle(lambda: not_kept(api, "store_away") == 1)
    for needing in ({"previous_response_id": UNKNOWN}, {"background": True}):
        refused = api.post("/v1/responses", {**body, **needing})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "store_unavailable"
        assert "'input'" in refused.json()["error"]["message"]
        assert "retry-after" in refused.headers
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        refused = api.http.request(method, f"/v1/responses/{first.json()['id']}{path}")
        assert refused.status_code == 503
    named = api.post("/v1/responses", body)
    assert named.status_code == 200
    assert (named.headers["x-baton-ignored"], named.json()["store"]) == ("store", False)
    assert not_kept(api, "store_away") == 2
    api.generator.wait_idle()
