"""Which workers a prompt's worker is told to fetch from."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from protocol.events import CacheEvents
from protocol.hashing import block_hashes, chain_root, seed_of
from protocol.messages import FinishReason, Generate, Prefill
from tests.unit.router.fake_worker import SECRET, FakeWorker
from tests.unit.router.router_harness import Consumer, Harness, request, until

TOKENS, BLOCK = 400, 4
HASHES = block_hashes(chain_root("weights", seed=seed_of(SECRET)), list(range(TOKENS)), BLOCK)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness(local_prefill_threshold_tokens=0)
    yield made
    await made.close()


async def hold(harness: Harness, worker: FakeWorker, num_blocks: int) -> None:
    await worker.subscribed()
    info = worker.info
    worker.publish(
        CacheEvents(
            worker_id=info.worker_id, incarnation=info.incarnation, seq=1,
            stored=HASHES[:num_blocks], removed=[],
        )
    )  # fmt: skip
    await until(lambda: harness.index.num_blocks(info.worker_id) == num_blocks)


async def test_the_two_that_hold_most_are_named_best_first_and_only_to_who_computes(
    harness: Harness,
) -> None:
    d1, d2, p1 = await harness.join("d1", "d2", "p1")
    await hold(harness, d1, 100)
    await hold(harness, d2, 60)
    consumer = Consumer(harness.dispatcher, request(num_tokens=TOKENS + 20))
    leg = await p1.received.next(Prefill)
    named = [(each.peer.worker_id, each.num_blocks) for each in leg.holders]
    assert named == [("d1", 100), ("d2", 60)]
    assert leg.holders[0].peer.incarnation == d1.info.incarnation
    other = await d1.received.next(Generate)
    assert other.holders == []
    p1.first_token(leg, 7, finish=FinishReason.STOP)
    assert await consumer.end() == [7]


async def test_who_holds_no_more_than_the_worker_that_computes_is_not_named(
    harness: Harness,
) -> None:
    d1, p1 = await harness.join("d1", "p1")
    await hold(harness, d1, 51)
    await hold(harness, p1, 50)
    consumer = Consumer(harness.dispatcher, request(num_tokens=TOKENS + 20))
    leg = await p1.received.next(Prefill)
    assert leg.holders == []
    p1.first_token(leg, 7, finish=FinishReason.STOP)
    assert await consumer.end() == [7]


async def test_nobody_is_named_where_fetching_is_off() -> None:
    harness = Harness(local_prefill_threshold_tokens=0, kv_fetch="off")
    d1, p1 = await harness.join("d1", "p1")
    await hold(harness, d1, 100)
    consumer = Consumer(harness.dispatcher, request(num_tokens=TOKENS + 20))
    leg = await p1.received.next(Prefill)
    assert leg.holders == []
    p1.first_token(leg, 7, finish=FinishReason.STOP)
    assert await consumer.end() == [7]
    await harness.close()
