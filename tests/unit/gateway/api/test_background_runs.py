"""How responses in the background end when their router stops, or the store is away."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from gateway.api.openai_responses import answer as api
from gateway.api.openai_responses import background
from gateway.api.openai_responses.background import BackgroundRuns
from gateway.api.openai_responses.memory import ResponseMemory
from gateway.api.openai_responses.request import ResponsesRequest
from gateway.api.openai_responses.responses import blank_response
from gateway.http.connection import BoundedProtocols
from gateway.http.connection_limits import ConnectionLimits
from gateway.http.server import Doorway, HttpServer, listen
from gateway.output.event_ids import StreamIdentity
from process.store import response_records
from process.store.embedded_valkey import EmbeddedValkey
from process.store.response_records import ResponseName, ResponseRecords
from protocol.errors import StoreAway

NAME = ResponseName("owner", "resp_" + "1" * 32)
FIELDS = ResponsesRequest(model="m", input="x", background=True)
BLANK = blank_response(StreamIdentity(NAME.id, 1), FIELDS, "m", is_kept=True)


def ended(status: api.ResponseStatus, message: str | None = None) -> api.Response:
    error = None if message is None else api.ResponseFailure("server_error", message)
    return msgspec.structs.replace(BLANK, status=status, error=error)


def failed(error: Exception) -> api.Response:
    return ended("failed", str(error))


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as running:
        yield running


class Stage:
    """A router's part in responses; `tasks` are those that it waits for when it stops."""

    def __init__(self, valkey: EmbeddedValkey) -> None:
        self.registry = CollectorRegistry()
        self.records = ResponseRecords(valkey.url, uuid.uuid4().hex, 1 << 24, time.monotonic)
        self.memory = ResponseMemory(self.records, self.registry)
        self.runs = BackgroundRuns(self.memory, self.registry)
        self.tasks: list[asyncio.Task[None]] = []
        self.memory.adopt = self.tasks.append
        self.num_ended = 0

    async def start(self, work: background.Work) -> asyncio.Task[None]:
        await self.memory.begin(NAME, msgspec.json.encode(BLANK), b"[]")
        self.runs.start(NAME, work, failed, self._note_end)
        return self.tasks[-1]

    def _note_end(self) -> None:
        self.num_ended += 1

    async def found(self) -> dict[str, object]:
        record = await self.memory.find(NAME)
        assert record is not None
        shown = msgspec.json.decode(record.answer)
        assert shown["status"] == record.status
        return shown

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"baton_responses_{name}", labels)


@pytest.fixture
async def stage(valkey: EmbeddedValkey, monkeypatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(response_records, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(background, "RENEW_S", 0.01)
    made = Stage(valkey)
    yield made
    await made.records.close()


async def test_a_router_that_stops_says_so(stage: Stage) -> None:
    runs = asyncio.Event()

    async def work() -> api.Response:
        runs.set()
        await asyncio.Event().wait()
        raise AssertionError("it never ends")

    task = await stage.start(work)
    await runs.wait()
    assert stage.metric("in_background") == 1
    task.cancel()
    await asyncio.wait((task,))
    shown = await stage.found()
    assert shown["status"] == "failed"
    assert "the router stopped" in shown["error"]["message"]
    assert stage.num_ended == 1
    assert stage.metric("in_background") == 0


async def test_an_answer_waits_for_the_store(stage: Stage, monkeypatch) -> None:
    finish, num_tries = stage.records.finish, 0

    async def away_twice(*args):
        nonlocal num_tries
        num_tries += 1
        if num_tries < 3:
            raise StoreAway
        return await finish(*args)

    monkeypatch.setattr(stage.records, "finish", away_twice)

    async def work() -> api.Response:
        return ended("completed")

    await (await stage.start(work))
    assert (await stage.found())["status"] == "completed"
    assert num_tries == 3
    assert stage.metric("kept_total") == 1


async def test_an_answer_that_never_finds_the_store_is_counted(stage: Stage, monkeypatch) -> None:
    async def away(*args):
        raise StoreAway

    monkeypatch.setattr(stage.records, "finish", away)
    monkeypatch.setattr(background, "LEASE_S", 0.03)

    async def work() -> api.Response:
        return ended("completed")

    await (await stage.start(work))
    assert stage.metric("not_kept_total", reason="store_away") == 1
    assert stage.num_ended == 1


async def test_leases_are_renewed_while_it_runs(stage: Stage, monkeypatch) -> None:
    """Each renewal is noticed by a lease that a test took away."""
    renewing = asyncio.create_task(stage.runs.run())
    goes_on = asyncio.Event()
    renew, renewed = stage.records.renew, asyncio.Queue()

    async def noted(*args):
        is_wanted = await renew(*args)
        renewed.put_nowait(is_wanted)
        return is_wanted

    monkeypatch.setattr(stage.records, "renew", noted)

    async def work() -> api.Response:
        await goes_on.wait()
        return ended("completed")

    task = await stage.start(work)
    assert [await renewed.get() for _ in range(3)] == [True] * 3
    goes_on.set()
    await task
    renewing.cancel()
    await asyncio.wait((renewing,))


async def test_a_server_that_ends_gives_tasks_of_no_connection_its_grace() -> None:
    async def app(scope, receive, send) -> None:
        raise AssertionError("nobody asks")

    grace_over, started, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
    doorway = Doorway(BoundedProtocols(ConnectionLimits(), CollectorRegistry()))
    server = HttpServer(app, doorway, 0.01, started.set, grace_over.set)
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve_until(stop, listener))
    await started.wait()
    ending = asyncio.create_task(grace_over.wait())
    server.wait_for(ending)
    stop.set()
    await serving
    assert ending.done()
    assert not ending.cancelled()
