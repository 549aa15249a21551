"""The flight recorders of a router and of its workers, over real sockets and over HTTP."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from console.endpoints.fleet import flight_router
from console.telemetry.flight import FlightReport
from console.telemetry.perfetto import perfetto_flight
from process.flight_recorder import FlightRecorder
from process.trace_context import CURRENT_TRACE, TraceContext
from protocol.errors import GenerationFailed, Overloaded, ServiceError
from protocol.flight import FlightEvent, FlightKind
from protocol.messages import FlightPage, FlightRequest, Generate, Prefill
from router.fleet import flight_questions
from router.fleet.clock_offset import ClockReading
from router.fleet.worker import Worker
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.router_harness import Consumer, Harness, failed, finish_on, request

STEP = FlightEvent(5_000, 900, FlightKind.STEP, number=2, tokens=64)
CHUNK = FlightEvent(5_000, 900, FlightKind.CHUNK, "r", 1, 0, 64)
LATER = FlightEvent(7_000, 0, FlightKind.FINISHED, "r", 1, 0, 3)
ANY = FlightRequest(nonce=0)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness(max_attempts=1)
    yield made
    await made.close()


@pytest.fixture
def recorder(harness: Harness) -> FlightRecorder:
    clock = itertools.count()
    made = FlightRecorder(lambda: float(next(clock)), lambda: 2_000_000)
    harness.dispatcher.on_refused = lambda name, reason: made.note(
        FlightKind.REFUSED, (name, 0), text=reason
    )
    return made


@pytest.fixture
def report(harness: Harness, recorder: FlightRecorder) -> FlightReport:
    return FlightReport(harness.fleet, harness.traces, recorder)


@pytest.fixture
async def client(report: FlightReport) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.include_router(flight_router(report))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as made:
        yield made


async def answer(worker: FakeWorker, *pages: list[FlightEvent]) -> list[FlightRequest]:
    """Answer the next questions with these pages; returns the questions."""
    asked = []
    for number, events in enumerate(pages, start=1):
        question = await worker.received.next(FlightRequest)
        asked.append(question)
        after = number * 10 if number < len(pages) else 0
        worker.send(FlightPage(nonce=question.nonce, after=after, events=events))
    return asked


async def test_a_worker_s_pages_are_joined_and_shifted_to_our_clock(harness: Harness) -> None:
    (decode,) = await harness.join("d1")
    worker = harness.fleet.worker("d1")
    assert worker is not None
    worker.link.clock.reading = ClockReading(1_000, 0)
    wanted = FlightRequest(nonce=0, request_id="r", since_us=3_000, until_us=8_000)
    asking = harness.fleet.flights.ask(worker, wanted)
    found, asked = await asyncio.gather(asking, answer(decode, [STEP, CHUNK], [LATER]))
    assert [each.at_us for each in found] == [4_000, 4_000, 6_000]
    assert [each.kind for each in found] == [FlightKind.STEP, FlightKind.CHUNK, FlightKind.FINISHED]
    assert [(each.after, each.request_id) for each in asked] == [(0, "r"), (10, "r")]
    assert {(each.since_us, each.until_us) for each in asked} == {(4_000, 9_000)}


async def test_a_worker_that_does_not_answer_and_one_that_answers_late(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    (decode,) = await harness.join("d1")
    worker = harness.fleet.worker("d1")
    assert worker is not None
    monkeypatch.setattr(flight_questions, "ANSWER_S", 0.01)
    with pytest.raises(ServiceError, match="d1 did not answer"):
        await harness.fleet.flights.ask(worker, ANY)
    late = await decode.received.next(FlightRequest)
    decode.send(FlightPage(nonce=late.nonce, after=0, events=[STEP]))
    monkeypatch.setattr(flight_questions, "ANSWER_S", 20.0)
    found, _ = await asyncio.gather(harness.fleet.flights.ask(worker, ANY), answer(decode, [LATER]))
    assert found == [LATER], "the late answer belongs to no later question"


async def test_only_the_worker_that_was_asked_answers(harness: Harness) -> None:
    """Numbers of questions can be guessed; another worker, or the former one of that name, gives
    none of its events out as this worker's."""
    asked_one, other = await harness.join("d1", "d2")
    worker, liar = harness.fleet.worker("d1"), harness.fleet.worker("d2")
    assert worker is not None
    assert liar is not None
    asking = asyncio.create_task(harness.fleet.flights.ask(worker, ANY))
    question = await asked_one.received.next(FlightRequest)
    for nonce in range(question.nonce - 1, question.nonce + 2):
        other.send(FlightPage(nonce=nonce, after=0, events=[STEP]))
    await liar.link.wait_for_pong(liar.link.ping(), 60.0)  # the pages have arrived
    former = Worker(worker.info, worker.link)
    harness.fleet.flights.answer(former, FlightPage(nonce=question.nonce, after=0, events=[STEP]))
    assert not asking.done()
    asked_one.send(FlightPage(nonce=question.nonce, after=0, events=[LATER]))
    assert await asyncio.wait_for(asking, 60.0) == [LATER]


async def test_a_router_s_events_are_those_of_its_requests_its_fleet_and_its_refusals(
    harness: Harness, report: FlightReport, client: httpx.AsyncClient
) -> None:
    with pytest.raises(Overloaded):  # no worker is there yet
        await Consumer(harness.dispatcher, request(10, "early")).end()
    (decode,) = await harness.join("d1")
    consumer = Consumer(harness.dispatcher, request(10, "good"))
    await finish_on(decode, consumer)
    bad = Consumer(harness.dispatcher, request(10, "bad"))
    decode.send(failed(await decode.received.next(Generate), decode, retryable=False))
    with pytest.raises(GenerationFailed):
        await bad.end()
    await harness.join("d2")
    shown = (await client.get("/flight")).json()
    assert shown["process"] == "router"
    of = {
        name: [each["kind"] for each in shown["events"] if each["request_id"] == name]
        for name in ("early", "good", "bad", "")
    }
    assert of["good"] == ["received", "placed", "first_token", "finished"]
    assert of["bad"] == ["received", "placed", "failed", "failed"]
    assert of["early"] == ["received", "failed"]
    assert of[""] == ["fleet"]
    texts = {each["text"] for each in shown["events"]}
    assert any("d2 joined" in each for each in texts), texts
    assert any("local: d1" in each for each in texts)
    assert any("out of luck" in each for each in texts)
    middle = shown["events"][len(shown["events"]) // 2]["at_us"]
    for bound, is_within in (("since_us", middle.__le__), ("until_us", middle.__ge__)):
        some = (await client.get(f"/flight?{bound}={middle}")).json()["events"]
        assert some == [each for each in shown["events"] if is_within(each["at_us"])]
        assert len(some) < len(shown["events"])
    only = (await client.get("/flight?request_id=good")).json()["events"]
    assert [each["kind"] for each in only if each["request_id"]] == of["good"]


async def test_a_refused_request_is_recorded(
    harness: Harness, report: FlightReport, client: httpx.AsyncClient
) -> None:
    harness.dispatcher.stop()
    with pytest.raises(Overloaded):
        await Consumer(harness.dispatcher, request(10, "late")).end()
    (event,) = (await client.get("/flight")).json()["events"]
    assert (event["kind"], event["request_id"]) == ("refused", "late")
    assert event["text"] == "the router stops"


async def test_the_http_answers(harness: Harness, client: httpx.AsyncClient) -> None:
    (decode,) = await harness.join("d1")
    asking = client.get("/flight?process=d1&request_id=r&since_us=1&until_us=9000")
    reply, (asked,) = await asyncio.gather(asking, answer(decode, [CHUNK]))
    assert (asked.request_id, asked.since_us, asked.until_us) == ("r", 1, 9000)
    (event,) = reply.json()["events"]
    assert event == {
        "at_us": 5_000, "duration_us": 900, "kind": "chunk", "request_id": "r", "attempt": 1,
        "number": 0, "tokens": 64, "text": "",
    }  # fmt: skip
    unknown = await client.get("/flight?process=d2")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == "there is no process d2; use one of router, d1"
    for query in ("since_us=-1", "until_us=soon", "worker=d1", f"since_us={'9' * 30}"):
        refused = await client.get(f"/flight?{query}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == query.partition("=")[0]


async def test_workers_learn_the_trace_of_a_request(harness: Harness) -> None:
    decode, prefill = await harness.join("d1", "p1")
    token = CURRENT_TRACE.set(TraceContext("a" * 32, "b" * 16, "c" * 16, "01"))
    try:
        traced = Consumer(harness.dispatcher, request(400, "traced"))
        assert (await decode.received.next(Generate)).trace_id == "a" * 32
        assert (await prefill.received.next(Prefill)).trace_id == "a" * 32
    finally:
        CURRENT_TRACE.reset(token)
    await traced.cancel()
    plain = Consumer(harness.dispatcher, request(401, "plain"))
    assert (await decode.received.next(Generate)).trace_id == ""
    await plain.cancel()


def test_a_file_for_perfetto_of_recorders() -> None:
    events = [
        {"at_us": 5, "duration_us": 9, "kind": "step", "request_id": "", "attempt": 0, "number": 2,
         "tokens": 64, "text": ""},
        {"at_us": 6, "duration_us": 0, "kind": "failed", "request_id": "r", "attempt": 0,
         "number": 0, "tokens": 0, "text": "out of luck"},
    ]  # fmt: skip
    whole = perfetto_flight([{"process": "d1", "events": events}])["traceEvents"]
    names = [each["args"]["name"] for each in whole if each["ph"] == "M"]
    assert names == ["d1", "recorded steps", "recorded events"]
    (span,) = [each for each in whole if each["ph"] == "X"]
    assert (span["name"], span["ts"], span["dur"]) == ("step", 5, 9)
    assert span["args"] == {"number": 2, "tokens": 64}
    (instant,) = [each for each in whole if each["ph"] == "i"]
    assert instant["args"] == {"request_id": "r", "attempt": 0, "text": "out of luck"}
