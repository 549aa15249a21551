"""What a router does beside answering."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from unittest.mock import MagicMock

import pytest

from protocol.messages import CacheDump
from router.routing.caches.block_lists import SLICE
from router_process import side_work
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


def test_a_clock_that_is_set_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    known_us = 0
    steps_us = (0, 7_200_000_000, 7_200_000_030, 0, -1_800_000_000, -1_800_000_900)
    with caplog.at_level(logging.INFO):
        for step_us in steps_us:
            known_us = side_work.log_clock_step(known_us, step_us)
    first, second, third = caplog.messages
    assert "it is 7200 s ahead of this router's own clock" in first
    assert second == "the system clock agrees with this router's own clock again"
    assert "it is 1800 s behind this router's own clock" in third


async def test_lags_are_not_measured_in_step_with_a_limit_of_cpu_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(pause_s: float) -> None:
        pauses.append(pause_s)
        await sleep(0)

    monkeypatch.setattr(side_work.asyncio, "sleep", note)
    parts: Any = MagicMock()
    watching = asyncio.create_task(side_work.watch_lag(parts))
    while parts.report.loop_lag.add.call_count < 100:
        await sleep(0)
    watching.cancel()
    await asyncio.wait([watching])
    assert 0.05 <= min(pauses) < 0.08
    assert 0.12 < max(pauses) <= 0.15
