"""What the store of responses does not take or give: too large, too slow, corrupt or gone."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import redis

from gateway.api.openai_responses import memory
from gateway.http.byte_budget import ByteBudget
from gateway.http.request_scope import RequestRecord
from gateway.text.tokenizer import Tokenizer
from process.store import response_records
from process.store.embedded_valkey import EmbeddedValkey
from tests.unit.gateway.api.keeping_server import (
    THEIRS,
    UNKNOWN,
    ask,
    client_of,
    keeping_server,
)
from tests.unit.gateway.api_harness import MODEL, TIMEOUT_S, LiveApi

OTHER_SHAPES = (
    b"7", b"null", b"{}", b"[7]", b"[{}]", b"\xff", b"[" * 10_000, b'[{"type": 5}]',
    b'[{"type": "message", "content": "x"}]', b'[{"type": "message", "content": [{}]}]',
    b'{"status": "odd", "output": []}', b'{"status": "completed", "output": [7]}',
)  # fmt: skip


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as running:
        yield running


@pytest.fixture(scope="module")
def running_api(
    valkey: EmbeddedValkey, tools_checkpoint: Path, tools_tokenizer: Tokenizer
) -> Iterator[LiveApi]:
    with keeping_server(tools_checkpoint, tools_tokenizer, valkey.url) as live:
        yield live


@pytest.fixture
def client(api: LiveApi) -> Iterator[openai.OpenAI]:
    with client_of(api) as each:
        yield each


def not_kept(api: LiveApi, reason: str) -> float:
    return api.metric("baton_responses_not_kept_total", reason=reason)


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


def record_in(store: redis.Redis, api: LiveApi, answer_id: str) -> bytes:
    """The key of a record, which is written behind the answer."""
    pattern = f"*:record:*{answer_id}"
    api.settle(lambda: any(store.scan_iter(pattern)))
    return next(store.scan_iter(pattern))


def test_a_record_that_nobody_can_read_is_not_found(client, api, valkey):
    answer = ask(client)
    assert client.responses.retrieve(answer.id) == answer
    with redis.Redis.from_url(valkey.url) as store:
        record = record_in(store, api, answer.id)
        store.hset(record, "answer", b"\x00bad")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


@pytest.mark.parametrize("field", ["answer", "input"])
def test_a_record_of_another_shape_is_not_found(client, api, valkey, field: str):
    kept = ask(client)
    with redis.Redis.from_url(valkey.url) as store:
        record = record_in(store, api, kept.id)
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
