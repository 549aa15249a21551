"""`/fleet` and `/requests/{id}/trace` over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from console.endpoints.fleet import admin_router
from console.telemetry.request_log import RequestLog
from http_kit.caller import CALLER, CURRENT_ORIGIN, NOBODY, Caller, Origin
from protocol.events import WorkerStats
from protocol.messages import FinishReason, Generate
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.router_harness import Consumer, Harness, request, until


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.close()


@pytest.fixture
async def client(harness: Harness) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.include_router(admin_router(harness.report, RequestLog(harness.traces)))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as made:
        yield made


async def test_the_fleet_with_its_load(harness: Harness, client: httpx.AsyncClient) -> None:
    assert (await client.get("/fleet")).json()["workers"] == []
    (decode, _) = await harness.join("d1", "p1")
    await decode.subscribed()
    decode.publish(
        WorkerStats(
            worker_id="d1",
            incarnation="d1-1",
            num_waiting=1,
            num_running=2,
            queued_tokens=300,
            blocks_total=1000,
            blocks_used=40,
            blocks_cached=50,
            num_handoffs=3,
            counters={"handoffs": 9},
        )
    )
    await until(lambda: harness.fleet.worker("d1").stats is not None)
    first, second = (await client.get("/fleet")).json()["workers"]
    expected = {
        "worker_id": "d1",
        "role": "decode",
        "state": "ready",
        "host": "127.0.0.1",
        "pid": 1,
        "control": decode.info.control,
        "model": "model",
        "transport": "nixl",
        "transport_paths": ["CMA", "TCP"],
        "num_waiting": 1,
        "num_running": 2,
        "queued_tokens": 300,
        "blocks_total": 1000,
        "blocks_used": 40,
        "blocks_cached": 50,
        "num_handoffs": 3,
        "counters": {"handoffs": 9},
        "connected": True,
    }
    assert {name: first.get(name) for name in expected} == expected
    assert second["worker_id"] == "p1"
    assert second["num_running"] == 0


async def test_a_trace_by_generation_and_by_request(
    harness: Harness, client: httpx.AsyncClient
) -> None:
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request(10, "cmpl-1-0"))
    leg = await decode.received.next(Generate)
    running = (await client.get("/requests/cmpl-1/trace")).json()
    assert (running["outcome"], running["finished_us"]) == ("running", 0)
    decode.tokens(leg, 0, [1, 2], finish=FinishReason.STOP)
    await consumer.end()
    answer = await client.get("/requests/cmpl-1-0/trace")
    assert answer.status_code == 200
    trace = answer.json()
    assert trace == (await client.get("/requests/cmpl-1/trace")).json()
    assert trace["outcome"] == "finished"
    assert trace["placement"]["mode"] == "local"
    assert trace["placement"]["decode_candidates"][0]["worker_id"] == "d1"
    assert [each["attempt"] for each in trace["attempts"]] == [1]


async def test_an_unknown_request_is_a_404_in_openais_shape(client: httpx.AsyncClient) -> None:
    answer = await client.get("/requests/nope/trace")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "nope" in error["message"]
    assert (error["param"], error["code"]) == ("request_id", "request_not_found")


async def finished(harness: Harness, decode: FakeWorker, request_id: str) -> None:
    consumer = Consumer(harness.dispatcher, request(10, request_id))
    leg = await decode.received.next(Generate)
    decode.tokens(leg, 0, [1, 2], finish=FinishReason.STOP)
    await consumer.end()


async def test_requests_by_order_outcome_and_prefix(
    harness: Harness, client: httpx.AsyncClient
) -> None:
    (decode,) = await harness.join("d1")
    for name in ("cmpl-a-0", "cmpl-b-0", "chat-c-0"):
        await finished(harness, decode, name)
    consumer = Consumer(harness.dispatcher, request(10, "chat-d-0"))
    leg = await decode.received.next(Generate)

    async def ids(query: str) -> list[str]:
        answer = await client.get(f"/requests?{query}")
        assert answer.status_code == 200, answer.text
        return [each["request_id"] for each in answer.json()["rows"]]

    assert await ids("") == ["chat-d-0", "chat-c-0", "cmpl-b-0", "cmpl-a-0"]
    assert await ids("outcome=running") == ["chat-d-0"]
    assert await ids("outcome=finished&prefix=chat") == ["chat-c-0"]
    assert await ids("outcome=retried") == []
    assert await ids("outcome=troubled") == []
    harness.traces.get("cmpl-b-0").key = "team-a"
    harness.traces.get("cmpl-a-0").outcome = "failed"
    assert await ids("prefix=team-a") == ["cmpl-b-0"]
    assert await ids("prefix=team") == [], "a key has its whole name"
    assert await ids("outcome=troubled") == ["cmpl-a-0"]
    harness.traces.get("cmpl-a-0").outcome = "finished"
    assert (await ids("order=slow&limit=1")) == ["chat-d-0"], "it has waited longest"
    assert len(await ids("order=slow")) == 4
    decode.tokens(leg, 0, [1], finish=FinishReason.STOP)
    await consumer.end()
    (row,) = (await client.get("/requests?prefix=cmpl-a")).json()["rows"]
    assert (row["outcome"], row["decode"], row["prefill"]) == ("finished", "d1", None)
    assert row["largest_stage"] in dict(row["stages"])
    assert sum(ms for _, ms in row["stages"]) == pytest.approx(row["ttft_ms"])


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("order=fast", "order"), ("outcome=lost", "outcome"), ("limit=0", "limit"),
        ("limit=201", "limit"), ("limit=x", "limit"), ("limits=3", "limits"),
    ],
)  # fmt: skip
async def test_a_bad_query_is_a_400_that_names_the_parameter(
    client: httpx.AsyncClient, query: str, name: str
) -> None:
    answer = await client.get(f"/requests?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


async def test_a_request_as_a_file_for_perfetto(
    harness: Harness, client: httpx.AsyncClient
) -> None:
    (decode,) = await harness.join("d1")
    await finished(harness, decode, "cmpl-1-0")
    answer = await client.get("/requests/cmpl-1/perfetto")
    assert answer.json()["otherData"] == {"request_id": "cmpl-1-0", "outcome": "finished"}
    assert (await client.get("/requests/nope/perfetto")).status_code == 404


async def test_the_trace_of_a_request_that_arrived_earlier(
    harness: Harness, client: httpx.AsyncClient
) -> None:
    (decode,) = await harness.join("d1")
    token = CURRENT_ORIGIN.set(Origin(900_000, NOBODY))
    try:
        await finished(harness, decode, "cmpl-1-0")
    finally:
        CURRENT_ORIGIN.reset(token)
    trace = (await client.get("/requests/cmpl-1/trace")).json()
    assert trace["received_us"] == 900_000
    assert trace["tokenize_ms"] >= 100
    stages = {each["stage"]: each["ms"] for each in trace["stages"] if each["part"] != "rest"}
    assert sum(stages.values()) == pytest.approx(trace["ttft_ms"])
    assert stages["tokenize"] == trace["tokenize_ms"]
    (attempt,) = trace["attempts"]
    assert attempt["placement"]["decode_candidates"][0]["near_tie"] is True
    assert trace["last_token_us"] >= trace["first_token_us"] >= trace["first_token_received_us"]


@pytest.mark.parametrize(
    ("sender", "reader", "status"),
    [
        (Caller(b"a"), Caller(b"a"), 200),
        (Caller(b"a"), Caller(b"b"), 404),
        (Caller(b"a"), NOBODY, 404),
        (Caller(b"a"), Caller(b"c", is_admin=True), 200),
        (NOBODY, NOBODY, 200),
    ],
)
async def test_a_receipt_is_for_its_sender_and_for_operators(
    harness: Harness, sender: Caller, reader: Caller, status: int
) -> None:
    (decode,) = await harness.join("d1")
    token = CURRENT_ORIGIN.set(Origin(900_000, sender))
    try:
        await finished(harness, decode, "cmpl-1-0")
    finally:
        CURRENT_ORIGIN.reset(token)
    log = RequestLog(harness.traces)
    app = FastAPI()
    app.include_router(admin_router(harness.report, log))

    async def as_reader(scope, receive, send) -> None:
        scope[CALLER] = reader
        await app(scope, receive, send)

    transport = httpx.ASGITransport(app=as_reader)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        answer = await client.get("/v1/requests/cmpl-1/receipt")
    assert answer.status_code == status
    if status == 200:
        receipt = answer.json()
        assert receipt["placement"]["reason"].startswith("local")
        assert {each["stage"] for each in receipt["stages"]} >= {"tokenize", "unexplained"}
    else:
        assert answer.json()["error"]["code"] == "request_not_found"
