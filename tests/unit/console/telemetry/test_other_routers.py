"""What routers tell each other: sums that add up, rows, questions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from console.telemetry.other_routers import PeerRouters, RouterSummary, SlotData, merged_pairs
from console.telemetry.request_log import Order, Outcome, RequestLog, RowQuery
from console.telemetry.request_window import Slot
from http_kit.caller import CURRENT_ORIGIN, NOBODY, Caller, Origin
from protocol.messages import FinishReason, Generate
from tests.unit.router.router_harness import Consumer, Harness, request

GOOD = [True], [{"ttft_ms": 100.0, "tpot_ms": 10.0, "queue_ms": 1.0}], 5


@pytest.fixture
async def here() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.close()


@pytest.fixture
async def there() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    await made.close()


def slot(start_us: int, count: int) -> Slot:
    made = Slot(start_us)
    for _ in range(count):
        made.add(*GOOD)
    return made


def test_a_slot_comes_back_from_the_wire() -> None:
    sent = SlotData.of(slot(5, 3))
    back = msgspec.json.decode(msgspec.json.encode(sent), type=SlotData)
    assert back == sent
    assert back.slot().ttft.quantile(0.5) == slot(5, 3).ttft.quantile(0.5)
    assert back.slot().ttft.count == 3


def summary(*points: Slot, **fields) -> bytes:
    known = {
        "minute": SlotData.of(slot(1, 6)), "seconds": 60.0, "num_inflight": 4, "pairs": [],
        "rows": [],
    }  # fmt: skip
    made = RouterSummary(points=[SlotData.of(each) for each in points], **(known | fields))
    return msgspec.json.encode(made)


def test_points_of_others_count_once_and_stay_when_their_router_is_gone() -> None:
    peers = PeerRouters()
    peers.take({"a": summary(slot(30, 2)), "b": summary(slot(30, 3))})
    peers.take({"a": summary(slot(30, 2), slot(60, 7)), "b": summary(slot(30, 3))})
    assert {at: each.num_ended for at, each in peers.points().items()} == {30: 5, 60: 7}
    peers.take({})
    assert {at: each.num_ended for at, each in peers.points().items()} == {30: 5, 60: 7}
    assert peers.summaries == {}


def test_a_summary_that_cannot_be_read_is_left_out() -> None:
    peers = PeerRouters()
    peers.take({"a": b"{", "b": b"\xff", "c": summary()})
    assert list(peers.summaries) == ["c"]


async def test_totals_are_those_of_all_routers(here: Harness) -> None:
    here.report.peers.take({"a": summary(), "b": summary()})
    totals = here.report.as_json()["totals"]
    assert totals["requests_per_s"] == pytest.approx(0.2)
    assert totals["goodput"] == 1.0
    assert totals["num_inflight"] == 8
    assert totals["ttft_p95_ms"] == pytest.approx(100, rel=0.02)


def test_pairs_of_several_routers_are_one() -> None:
    pair = {
        "prefill": "p", "decode": "d", "path": "unknown", "expected_path": "CMA",
        "bytes_per_s": 5.0, "busy_bytes_per_s": 9.0, "blocks_per_s": 1.0, "writes_per_s": 1.0,
        "exposed_p95_ms": None, "failures": 1, "is_below_way": False,
    }  # fmt: skip
    other = pair | {"path": "CMA", "exposed_p95_ms": 3.0, "busy_bytes_per_s": 4.0}
    (merged,) = merged_pairs([[pair], [other]])
    assert (merged["bytes_per_s"], merged["failures"], merged["path"]) == (10.0, 2, "CMA")
    assert (merged["exposed_p95_ms"], merged["busy_bytes_per_s"]) == (3.0, 9.0)
    assert pair["failures"] == 1, "the parts are left as they were"


async def run(harness: Harness, request_id: str, caller: Caller = NOBODY) -> None:
    worker = harness.workers.get("d1") or (await harness.join("d1"))[0]
    token = CURRENT_ORIGIN.set(Origin(900_000, caller))
    try:
        consumer = Consumer(harness.dispatcher, request(10, request_id))
    finally:
        CURRENT_ORIGIN.reset(token)
    leg = await worker.received.next(Generate)
    worker.tokens(leg, 0, [1, 2], finish=FinishReason.STOP)
    await consumer.end()


async def test_requests_of_another_router(here: Harness, there: Harness) -> None:
    await run(here, "cmpl-here-0")
    await run(there, "cmpl-there-0", Caller(b"a"))
    there.report.peers.take({"here": summary()})
    others = RequestLog(there.traces, there.report.peers)

    async def ask(question: bytes, timeout_s: float) -> bytes | None:
        return others.answer(question)

    log = RequestLog(here.traces, here.report.peers, ask)
    told = there.report.summary(others.shared_rows())
    here.report.peers.take({"there": msgspec.json.encode(told)})
    ids = [each["request_id"] for each in log.rows(RowQuery(Order.SLOW))]
    assert sorted(ids) == ["cmpl-here-0", "cmpl-there-0"]
    assert [e["request_id"] for e in log.rows(RowQuery(prefix="cmpl-t"))] == ["cmpl-there-0"]
    assert log.rows(RowQuery(outcome=Outcome.FAILED)) == []
    trace = await log.trace("cmpl-there")
    assert trace["request_id"] == "cmpl-there-0"
    assert (await log.receipt("cmpl-there", Caller(b"a")))["outcome"] == "finished"
    assert await log.receipt("cmpl-there", Caller(b"b")) is None
    assert await log.trace("cmpl-nowhere") is None
    assert others.answer(b"\xc1") is None


async def test_shared_rows_are_few_and_made_once(here: Harness) -> None:
    for number in range(100):
        here.traces.end(here.traces.begin(f"r{number}", 5), "finished")
    log = RequestLog(here.traces, here.report.peers)
    assert log.shared_rows() == [], "nobody reads them"
    here.report.peers.take({"there": summary()})
    told = log.shared_rows()
    assert len(told) == 80
    assert log.shared_rows()[0] is told[0]
