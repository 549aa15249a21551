"""One worker's connection: hello, refusals, garbage, silence, breaks."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
import pytest
import zmq

from process.sockets.hello import NO_HELLO
from protocol.control_message import ControlMessage
from protocol.events import CacheEvents
from protocol.messages import (
    AttemptFailed,
    CacheDumpRequest,
    Generate,
    Hello,
    HelloRefused,
    Ping,
    Pong,
    Role,
)
from protocol.sampling import SamplingParams
from protocol.wire import encode
from router.fleet import inflow_checks
from router.fleet.conditions import Cause, State
from router.fleet.link import WorkerLink
from router.fleet.worker import Loss, Worker
from tests.ports import held_port
from tests.unit.router.fake_worker import WAIT_S, FakeWorker
from tests.unit.router.router_harness import Harness, until

REQUEST = Generate(
    request_id="r", attempt=1, token_ids=[1], num_output=0, deadline_ms=1000,
    sampling=SamplingParams(max_tokens=1, seed=0),
)  # fmt: skip


async def test_hello_comes_first_and_names_the_model_only(harness: Harness) -> None:
    (worker,) = await harness.join("d1")
    hello = await worker.received.next(Hello)
    assert (hello.role, hello.model_fingerprint) == (Role.ROUTER, "weights")
    assert hello.layout_fingerprint == ""
    await worker.received.next(CacheDumpRequest)
    first = await worker.received.next(Ping)
    second = await worker.received.next(Ping)
    assert second.nonce == first.nonce + 1


async def test_a_refusal_is_logged_once_with_both_values_and_is_final(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    worker = harness.make("d1")
    worker.refusal = HelloRefused(what="model fingerprint", ours="bbb", theirs="aaa")
    harness.workers["d1"] = worker
    with caplog.at_level(logging.ERROR):
        harness.refresh()
        link = harness.fleet.worker("d1").link
        await until(lambda: link.is_closed)
        harness.refresh()
    assert link.refused == worker.refusal
    assert not harness.is_usable("d1")
    assert not link.send(REQUEST)
    assert link.num_legs == 0, "it was not sent"
    (record,) = caplog.records
    assert "model fingerprint is aaa here and bbb there" in record.getMessage()
    condition = harness.fleet.condition(worker.info)
    assert (condition.state, condition.cause) == (State.REFUSED, Cause.MODEL)
    assert worker.received.count(Hello) == 1


async def test_a_worker_that_cannot_be_reached_is_named_with_its_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = Harness(unreachable_s=0.2)
    try:
        with caplog.at_level(logging.WARNING):
            await harness.join("d1")
            harness.workers["d2"] = harness.make("d2", control="tcp://127.0.0.1:1")
            harness.refresh()
            d2 = harness.workers["d2"].info
            assert harness.fleet.condition(d2).state is State.STARTING
            await until(lambda: harness.fleet.condition(d2).state is State.NOT_CONNECTED)
        condition = harness.fleet.condition(d2)
        assert condition.cause is Cause.ADDRESS
        assert "tcp://127.0.0.1:1 and has not answered there for 0.2 s" in condition.reason
        told = [each for each in caplog.messages if "d2 is registered" in each]
        assert len(told) == 1
        assert "has not answered at tcp://127.0.0.1:1" in told[0]
    finally:
        await harness.close()


async def test_another_worker_at_the_same_address_is_not_taken(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    worker = harness.make("d1")
    registered = harness.make("d1", control=worker.info.control, incarnation="older")
    harness.workers["d1"] = registered
    harness.refresh()
    link = harness.fleet.worker("d1").link
    await until(lambda: link.is_closed)
    assert not link.is_ready
    assert "d1/older here and d1/d1-1 there" in caplog.text
    condition = harness.fleet.condition(registered.info)
    assert (condition.state, condition.cause) == (State.REFUSED, Cause.ADDRESS)
    assert condition.reason == "d1/d1-1 answers at its address"


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"\xc1garbage"], "undecodable"),
        ([b""], "undecodable"),
        ([encode(Ping(nonce=1)), b"more"], "undecodable"),
        ([encode(Hello(sender="x", role=Role.DECODE, protocol_version=1,
                       model_fingerprint="", layout_fingerprint=""))], "unexpected"),
    ],
)  # fmt: skip
async def test_frames_that_cannot_be_taken_are_counted(harness: Harness, frames, reason) -> None:
    (worker,) = await harness.join("d1")
    worker.send_frames(*frames)
    await until(lambda: harness.metric("refused_frames_total", reason=reason) == 1)
    assert harness.is_usable("d1")


async def test_a_report_that_cannot_be_true_ends_the_connection_and_another_follows(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    liar, other = await harness.join("d1", "d2")
    await liar.subscribed()
    hashes = [number.to_bytes(16, "big") for number in range(3 * liar.info.num_blocks)]
    liar.publish(CacheEvents(worker_id="d1", incarnation="d1-1", seq=1, stored=hashes, removed=[]))
    await until(lambda: harness.metric("refused_frames_total", reason="impossible") == 1)
    assert "ended the connection to d1: it reports more than" in caplog.text
    assert "Traceback" not in caplog.text
    assert harness.is_usable("d2")
    await until(lambda: harness.is_usable("d1"))
    assert other.received.count(Hello) == 1


async def test_garbage_among_events_is_counted(harness: Harness) -> None:
    (worker,) = await harness.join("d1")
    await worker.subscribed()
    worker.events.send(b"garbage", zmq.DONTWAIT)
    worker.publish(
        CacheEvents(worker_id="d1", incarnation="d1-0", seq=1, stored=[b"x"], removed=[])
    )
    await until(lambda: harness.metric("refused_frames_total", reason="foreign") == 1)
    assert harness.metric("refused_frames_total", reason="undecodable") == 1
    assert harness.index.num_blocks("d1") == 0


async def test_before_hello_is_accepted_nothing_is_taken(harness: Harness) -> None:
    worker = harness.make("d1")
    worker.refusal = Pong(nonce=0)
    harness.workers["d1"] = worker
    harness.refresh()
    await until(lambda: harness.metric("refused_frames_total", reason="no_hello") == 1)
    assert not harness.is_usable("d1")


async def test_a_silent_worker_is_not_responsive_but_ready(harness: Harness) -> None:
    (worker,) = await harness.join("d1")
    worker.answers_pings = False
    link = harness.fleet.worker("d1").link
    assert link.is_responsive(time.monotonic())
    assert not link.is_responsive(time.monotonic() + harness.settings.silence_s + 1)
    assert link.is_ready


async def test_an_answer_is_waited_for_as_long_as_one_can_come(harness: Harness) -> None:
    (worker,) = await harness.join("d1")
    link = harness.fleet.worker("d1").link
    await asyncio.wait_for(link.wait_for_pong(link.ping(), 60), WAIT_S)
    worker.answers_pings = False
    asked = link.ping()
    await link.wait_for_pong(asked, 0.01)
    assert link.last_pong < asked
    waiting = asyncio.create_task(link.wait_for_pong(asked, 60))
    await asyncio.sleep(0)
    await harness.kill("d1")
    await asyncio.wait_for(waiting, WAIT_S)
    assert link.last_pong < asked


async def test_a_worker_that_forgot_us_is_greeted_again(harness: Harness) -> None:
    (worker,) = await harness.join("d1")
    first = await worker.received.next(Hello)
    await worker.received.next(CacheDumpRequest)
    link = harness.fleet.worker("d1").link
    assert link.send(REQUEST)
    assert link.send(Ping(nonce=1))
    assert (link.session, link.num_legs) == (first.session, 1), "requests are counted"
    worker.send(NO_HELLO)
    again = await worker.received.next(Hello)
    assert (link.session, link.num_legs) == (again.session, 0)
    assert again == msgspec.structs.replace(first, session=again.session)
    assert again.session != first.session, "what the former session sent is not counted in this one"
    await worker.received.next(CacheDumpRequest)
    await until(lambda: harness.is_usable("d1"))
    assert harness.metric("refused_frames_total", reason="no_hello") == 0


async def test_a_worker_that_listens_late_is_reached(harness: Harness) -> None:
    """Its registration may be read before its socket accepts."""
    held = [held_port() for _ in range(2)]
    control, events = (f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in held)
    late = harness.make("d1", control=control, events=events)
    harness.workers["d1"] = late
    harness.refresh()
    link = harness.fleet.worker("d1").link
    await until(lambda: link._control is not None)
    late.control.bind(control)
    late.events.bind(events)
    await until(lambda: harness.is_usable("d1"))
    await late.subscribed()
    assert harness.fleet.worker("d1").link is link
    for each in held:
        each.close()


async def test_the_last_words_of_a_worker_that_ends_are_heard(harness: Harness) -> None:
    """They come before the news that the connection broke, however busy the router is."""
    (worker,) = await harness.join("d1")
    heard: list[str] = []
    harness.fleet.listen(Eavesdropper(heard))
    words = [AttemptFailed(request_id="r", attempt=i, worker_id="d1", reason="", retryable=True)
             for i in range(300)]  # fmt: skip
    for each in words:
        worker.send(each)
    worker.control.close(linger=60_000)
    await until(lambda: heard[-1:] == ["lost"])
    assert heard == [*map(str, range(300)), "lost"]


async def broken_off(harness: Harness) -> tuple[WorkerLink, list[str], FakeWorker]:
    """A link whose worker is gone, and of whose 3000 last words some are still to be taken."""
    (worker,) = await harness.join("d1")
    link = harness.fleet.worker("d1").link
    heard: list[str] = []
    harness.fleet.listen(Eavesdropper(heard))
    for number in range(3000):
        worker.send(AttemptFailed(request_id="r", attempt=number, worker_id="d1", reason="",
                                  retryable=True))  # fmt: skip
    worker.control.close(linger=60_000)
    await until(lambda: link.is_ending)
    return link, heard, worker


async def test_a_worker_whose_last_words_are_taken_gets_no_requests_and_is_not_lost_yet(
    harness: Harness,
) -> None:
    link, heard, _ = await broken_off(harness)
    assert not harness.is_usable("d1")
    assert not link.send(REQUEST)
    harness.workers.pop("d1")
    harness.refresh()
    assert harness.fleet.worker("d1") is not None
    await until(lambda: harness.fleet.worker("d1") is None)
    assert heard == [*map(str, range(3000)), "lost"]


async def test_the_next_connection_to_an_address_is_another_session(harness: Harness) -> None:
    """ZeroMQ connects again by itself while the last words of the former session are taken."""
    link, heard, former = await broken_off(harness)
    first = await former.received.next(Hello)
    late = harness.make("d1", control=former.info.control)
    late.control.bind(former.info.control)
    hello = await late.received.next(Hello)
    assert hello.session not in (first.session, "")
    await until(lambda: link.is_ready)
    assert heard == [*map(str, range(3000)), "lost"]


@pytest.mark.parametrize("plane", ["control", "events"])
async def test_a_worker_whose_message_has_no_end_is_disconnected(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, plane: str
) -> None:
    """ZeroMQ would gather its frames for ever."""
    monkeypatch.setattr(inflow_checks, "MAX_UNREAD_BYTES", 1 << 20)
    monkeypatch.setattr(inflow_checks, "CHECK_S", 0.01)
    rogue, _ = await harness.join("d1", "d2")
    await rogue.subscribed()
    endless = [b"x" * 60_000] * 4000
    if plane == "control":
        assert rogue.router is not None
        rogue.control.send_multipart([rogue.router, *endless], zmq.DONTWAIT, copy=False)
    else:
        rogue.events.send_multipart(endless, zmq.DONTWAIT, copy=False)
    await until(lambda: harness.metric("refused_frames_total", reason="impossible") == 1)
    assert harness.metric("refused_frames_total", reason="undecodable") == 0, "it never came"
    assert harness.is_usable("d2")


class Eavesdropper:
    """Notes what a fleet tells about requests."""

    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def on_message(self, worker: Worker, message: ControlMessage) -> None:
        assert isinstance(message, AttemptFailed)
        self._heard.append(str(message.attempt))

    def on_lost(self, worker: Worker, reason: str, loss: Loss) -> int:
        self._heard.append("lost")
        return 0

    def on_fleet(self) -> None:
        pass
