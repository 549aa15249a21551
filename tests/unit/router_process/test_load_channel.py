"""A router's process tells the others what it sends, and counts what they tell it."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import AsyncExitStack

import msgspec
import redis

from console.telemetry.other_routers import RouterSummary, SlotData
from console.telemetry.request_window import Slot
from process.store.embedded_valkey import EmbeddedValkey
from protocol.messages import FinishReason
from router.routing.sent_requests import SentRequest, SentRequests, decode, encode
from router_process.parts import assemble, board_of
from router_process.settings import RouterSettings
from tests.unit.router.fake_worker import WAIT_S, FakeWorker
from tests.unit.router_process.running_router import (
    COMPLETION,
    RouterProcess,
    healthy,
    registered,
    serve,
)

ID = b"another one."


def announce_a_router(store: redis.Redis, fleet: str, name: str = "") -> None:
    """Another router is there."""
    name = name or secrets.token_hex(6)
    body = msgspec.json.encode(RouterSummary(SlotData.of(Slot(1)), 60.0, [], 0, [], []))
    store.set(f"baton:{fleet}:router:{name}", body, ex=600)
    store.zadd(f"baton:{fleet}:routers", {name: time.time() + 600})


async def publish(store: redis.Redis, fleet: str, sent: list[SentRequests]) -> None:
    """Tell the router, once it listens beside this test."""
    async with asyncio.timeout(WAIT_S):
        while store.pubsub_numsub(f"baton:{fleet}:sent")[0][1] < 2:
            await asyncio.sleep(0.02)
    store.publish(f"baton:{fleet}:sent", ID + encode(sent))


async def next_message(channel: redis.client.PubSub) -> bytes:
    """The next message that is not this test's own."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = channel.get_message(ignore_subscribe_messages=True)
            if found is not None and not found["data"].startswith(ID):
                return found["data"]
            await asyncio.sleep(0.02)


async def test_a_router_avoids_a_worker_to_which_another_has_sent_much(
    router: RouterProcess,
    worker: FakeWorker,
    valkey: EmbeddedValkey,
    cluster: str,
) -> None:
    """It also publishes the request that it has sent itself."""
    with redis.Redis.from_url(valkey.url) as store, store.pubsub() as channel:
        channel.subscribe(f"baton:{cluster}:sent")
        announce_a_router(store, cluster)
        async with registered(valkey, cluster, worker_id="d2", max_context=123) as second:
            await healthy(router.client)
            async with asyncio.timeout(WAIT_S):
                while sum(e["connected"] for e in (await fleet(router))["workers"]) < 2:
                    await asyncio.sleep(0.02)
            there = SentRequests("d1", "there", 1, 1, [SentRequest(1, 100_000, 900)])
            await publish(store, cluster, [there])
            serving = asyncio.create_task(serve(second, [70], finish=FinishReason.LENGTH))
            answer = await router.client.post("/v1/completions", json=COMPLETION)
            assert answer.content.endswith(b"data: [DONE]\n\n")
            leg = await serving
            (sent,) = decode((await next_message(channel))[len(ID) :])
            assert (sent.worker_id, sent.first, sent.last) == ("d2", 1, 1)
            assert len(leg.token_ids) > 0


async def test_the_rank_of_a_router_is_the_number_of_others_with_smaller_ids(
    valkey: EmbeddedValkey,
    cluster: str,
) -> None:
    settings = RouterSettings(
        model="unused", redis_url=valkey.url, cluster=cluster, cluster_secret=secrets.token_hex(16)
    )
    async with AsyncExitStack() as stack:
        parts = assemble(settings, stack)
        stagger, board = parts.fleet.view().stagger, board_of(settings, parts)
        with redis.Redis.from_url(valkey.url) as store:
            for name in (12 * "0", 11 * "0" + "1", 12 * "f"):
                announce_a_router(store, cluster, name)
        running = asyncio.create_task(board.run())
        try:
            async with asyncio.timeout(WAIT_S):
                while len(parts.report.peers.summaries) < 3:
                    await asyncio.sleep(0.01)
            assert stagger.rank == 2
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def fleet(router: RouterProcess) -> dict:
    return (await router.client.get("/fleet")).json()
