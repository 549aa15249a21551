"""`/fleet` and `/requests/{id}/trace` over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from protocol.events import WorkerStats
from protocol.messages import FinishReason, Generate
from router.api.admin import admin_router
from tests.unit.router.router_harness import Consumer, Harness, request, until


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.close()


@pytest.fixture
async def client(harness: Harness) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.include_router(admin_router(harness.fleet, harness.traces))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as made:
        yield made


async def test_the_fleet_with_its_load(harness: Harness, client: httpx.AsyncClient) -> None:
    assert (await client.get("/fleet")).json() == []
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
    first, second = (await client.get("/fleet")).json()
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
