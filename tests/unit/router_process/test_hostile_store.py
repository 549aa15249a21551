"""Garbage under every key that a router reads: it goes on serving, and counts what it ignores."""

from __future__ import annotations

import asyncio
import re
import secrets
import time

import httpx
import msgspec
import pytest
import redis

from console.telemetry.other_routers import RouterSummary, SlotData
from console.telemetry.request_window import Slot
from process.store.embedded_valkey import EmbeddedValkey
from protocol.messages import FinishReason
from tests.effort import some
from tests.garbage import GARBAGE, keys_of, spoil
from tests.unit.router.fake_worker import WAIT_S, FakeWorker
from tests.unit.router_process.running_router import (
    COMPLETION,
    RouterProcess,
    healthy,
    serve,
)

GOOD_ROW = {
    "request_id": "cmpl-there-0", "key": None, "outcome": "finished", "received_us": 1,
    "num_attempts": 1, "prefill": None, "decode": "d", "ttft_ms": 1.0, "tpot_ms": None,
    "largest_stage": "queue", "stages": [["queue", 1.0]],
}  # fmt: skip
BAD_ROWS = (
    {}, {"request_id": 5}, GOOD_ROW | {"received_us": "now"}, GOOD_ROW | {"ttft_ms": 1e300},
    GOOD_ROW | {"num_attempts": -1},
)  # fmt: skip


def summary() -> bytes:
    empty = SlotData.of(Slot(1))
    return msgspec.json.encode(RouterSummary(empty, 60.0, [], 0, [{}], [*BAD_ROWS, GOOD_ROW]))


async def ignored(client: httpx.AsyncClient, kind: str) -> int:
    text = (await client.get("/metrics")).text
    found = re.search(rf'baton_store_entries_ignored_total{{kind="{kind}"}} (\d+)', text)
    assert found is not None
    return int(found[1])


async def tell(store: redis.Redis, fleet: str, client: httpx.AsyncClient) -> None:
    """A router that never was tells rows, of which one can be read; wait until they were."""
    name, before = secrets.token_hex(6), await ignored(client, "summary")
    async with asyncio.timeout(WAIT_S):
        while await ignored(client, "summary") < before + len(BAD_ROWS):
            store.set(f"baton:{fleet}:router:{name}", summary(), ex=60)
            if store.type(f"baton:{fleet}:routers") == b"zset":
                store.zadd(f"baton:{fleet}:routers", {name: time.time() + 60, b"\xff": 1e300})
            if store.type(f"baton:{fleet}:workers") == b"set":
                store.sadd(f"baton:{fleet}:workers", "x")
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("router", [["--responses-store"]], indirect=True)
async def test_streams_go_on_whatever_the_store_holds(
    router: RouterProcess,
    worker: FakeWorker,
    valkey: EmbeddedValkey,
    cluster: str,
) -> None:
    client = router.client
    await healthy(client)
    stream = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
    leg = await serve(worker, [5])
    with redis.Redis.from_url(valkey.url) as store:
        for first in some(range(len(GARBAGE)), 1):
            spoil(store, keys_of(cluster, ["d1"], []), first)
            await tell(store, cluster, client)
            rows = (await client.get("/requests")).json()["rows"]
            assert [e for e in rows if e["request_id"] == GOOD_ROW["request_id"]] == [GOOD_ROW]
            for path in ("/fleet", "/requests/nobody/trace", "/health", "/metrics"):
                assert (await client.get(path)).status_code in (200, 404), path
    worker.tokens(leg, 1, [6, 7], finish=FinishReason.LENGTH)
    assert (await stream).content.endswith(b"data: [DONE]\n\n")
    assert router.process.is_running()
    await healthy(client)
    assert await ignored(client, "router") > 0
