"""The stream of summaries over a real connection: whole at first, then what changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from console.dashboard.feed import Feed
from console.dashboard.stream_endpoint import stream_router
from gateway.http.connection import BoundedProtocols, ConnectionLimits
from gateway.http.server import Doorway, HttpServer, listen, url_of

WAIT_S = 30.0


class Fixture:
    """A server with a feed whose summaries count how often they were built."""

    def __init__(self) -> None:
        self.num_built = 0
        self.feed = Feed({"fleet": self._fleet, "doctor": dict}, period_s=0.01)
        app = FastAPI(openapi_url=None)
        app.include_router(stream_router(self.feed))
        limits = ConnectionLimits(32_000, 32_000, 60.0, 30.0)
        protocols = BoundedProtocols(limits, CollectorRegistry())
        self.listener = listen("127.0.0.1", 0)
        self.server = HttpServer(app, Doorway(protocols), 60.0, lambda: None, lambda: None)
        self.stop = asyncio.Event()

    def _fleet(self) -> dict[str, Any]:
        self.num_built += 1
        workers = [{"worker_id": "d1", "num_running": self.num_built, "state": "ready"}]
        return {"workers": workers, "pairs": [], "big": "x" * 100_000}

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=url_of(self.listener), timeout=WAIT_S)


@pytest.fixture
async def served() -> AsyncIterator[Fixture]:
    made = Fixture()
    tasks = [
        asyncio.create_task(made.server.serve_until(made.stop, made.listener)),
        asyncio.create_task(made.feed.run(made.stop)),
    ]
    yield made
    made.stop.set()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*tasks)
    made.listener.close()
    assert made.feed.num_readers == 0


async def events(response: httpx.Response, count: int) -> list[tuple[str, str, Any]]:
    """The next events, as id, name and data."""
    found: list[tuple[str, str, Any]] = []
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
            continue
        found.append((fields["id"], fields["event"], json.loads(fields["data"])))
        if len(found) == count:
            return found
    return found


async def test_the_first_summary_is_whole_and_the_next_has_changes(served: Fixture) -> None:
    async with served.client() as client, client.stream("GET", "/dashboard/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        (_, name, first), (_, _, second) = await events(response, 2)
    assert name == "fleet"
    assert first["worker_ids"] == ["d1"]
    assert first["workers"][0]["state"] == "ready"
    assert second["workers"][0].keys() == {"worker_id", "num_running"}
    assert (second.keys(), second["pairs"]) == ({"workers", "pairs"}, [])


async def test_a_view_gets_its_own_events(served: Fixture) -> None:
    async with served.client() as client:
        async with client.stream("GET", "/dashboard/stream?view=doctor") as response:
            assert [name for _, name, _ in await events(response, 2)] == ["fleet", "doctor"]
        async with client.stream("GET", "/dashboard/stream?view=cache") as response:
            assert [name for _, name, _ in await events(response, 2)] == ["fleet", "fleet"]
        wrong = await client.get("/dashboard/stream?view=nothing")
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "view"


async def test_a_reader_that_comes_back_gets_what_changed(served: Fixture) -> None:
    async with served.client() as client:
        async with client.stream("GET", "/dashboard/stream") as response:
            ((last, _, _),) = await events(response, 1)
        for sent, is_whole in ((last, False), ("other-1", True), (last[:9] + "999999", True)):
            headers = {"last-event-id": sent}
            async with client.stream("GET", "/dashboard/stream", headers=headers) as response:
                ((_, _, data),) = await events(response, 1)
            assert ("big" in data) is is_whole, sent


async def test_one_summary_serves_all_readers(served: Fixture) -> None:
    async with served.client() as client:
        async with client.stream("GET", "/dashboard/stream") as one:
            async with client.stream("GET", "/dashboard/stream") as other:
                first, second = await asyncio.gather(events(one, 20), events(other, 20))
    numbers = {each[0] for each in (*first, *second)}
    assert len(numbers) <= served.num_built
    by_id = {each[0]: each[2] for each in first}
    assert all(by_id[each[0]] == each[2] for each in second[1:] if each[0] in by_id)


async def test_nothing_is_built_without_a_reader(served: Fixture) -> None:
    async with served.client() as client:
        async with client.stream("GET", "/dashboard/stream") as response:
            await events(response, 1)
    async with asyncio.timeout(WAIT_S):
        while served.feed.num_readers:
            await asyncio.sleep(0.001)
    built = served.num_built
    await asyncio.sleep(0.05)  # five periods
    assert served.num_built <= built + 1


async def test_a_stopping_router_waits_for_no_page(served: Fixture) -> None:
    """Its grace is 60 s here, and the fixture waits 30 s for the end."""
    async with served.client() as client, client.stream("GET", "/dashboard/stream") as response:
        async for line in response.aiter_lines():
            if not line:
                served.stop.set()
        assert response.is_closed, "the router has ended the answer"


async def test_summaries_do_not_queue_for_a_slow_reader(served: Fixture) -> None:
    reader, writer = await asyncio.open_connection(*served.listener.getsockname()[:2], limit=1024)
    writer.write(b"GET /dashboard/stream HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        await reader.readuntil(b"\r\n\r\n")
        while served.num_built < 50:
            await asyncio.sleep(0.01)
        writer.transport.abort()
    assert served.feed.number >= 50
