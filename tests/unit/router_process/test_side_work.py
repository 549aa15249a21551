"""What a router does beside answering."""

from __future__ import annotations

import asyncio

from protocol.messages import CacheDump
from router.routing.block_lists import SLICE
from router_process.side_work import keep_indexing
from tests.unit.router.router_harness import Harness, until


async def test_a_large_cache_is_indexed_without_a_sweep() -> None:
    harness = Harness()
    await harness.join("d1")
    await until(lambda: harness.index.is_synced("d1"))
    hashes = [number.to_bytes(16, "little") for number in range(3 * SLICE)]
    incarnation = harness.workers["d1"].info.incarnation
    harness.index.apply_dump("d1", CacheDump(incarnation=incarnation, seq=9, hashes=hashes))
    assert harness.index.num_blocks("d1") == 0
    indexing = asyncio.create_task(keep_indexing(harness.fleet))
    await until(lambda: harness.index.num_blocks("d1") == len(hashes))
    indexing.cancel()
    await asyncio.wait([indexing])
    await harness.close()
