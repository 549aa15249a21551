"""Deadlines on one timer: each ends its own task, in time, and leaves nothing."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from router.requests.deadline_timer import MIN_ENDED, Deadlines

LONG_S = 600.0


async def wait_until(deadlines: Deadlines, wait_s: float, since: float | None = None) -> str:
    try:
        with deadlines.until((time.monotonic() if since is None else since) + wait_s):
            await asyncio.Event().wait()
    except TimeoutError:
        return "over"
    return "never"


async def test_each_ends_by_its_own_however_they_are_ordered() -> None:
    """The clock stands still until all of them wait: who comes first is not up to the machine."""
    began = time.monotonic()
    clock = SimpleNamespace(now=lambda: began)
    deadlines = Deadlines(lambda: clock.now())
    ended: list[float] = []

    async def run(wait_s: float) -> None:
        assert await wait_until(deadlines, wait_s, began) == "over"
        ended.append(wait_s)

    patient = asyncio.create_task(wait_until(deadlines, LONG_S, began))
    waits_s = [0.08, 0.02, 0.0, 0.05, -1.0]
    running = [asyncio.create_task(run(each)) for each in waits_s]
    while len(ended) < 2:
        await asyncio.sleep(0)
    assert sorted(ended) == [-1.0, 0.0]
    clock.now = time.monotonic
    await asyncio.gather(*running)
    assert ended[2:] == [0.02, 0.05, 0.08]
    assert len(deadlines) == 1
    assert not patient.done()
    patient.cancel()
    await asyncio.wait([patient])
    assert patient.cancelled()
    assert len(deadlines) == 0


async def test_what_ends_in_time_is_forgotten() -> None:
    deadlines = Deadlines(time.monotonic)
    patient = asyncio.create_task(wait_until(deadlines, LONG_S))
    await asyncio.sleep(0)
    for _ in range(10 * MIN_ENDED):
        with deadlines.until(time.monotonic() + LONG_S):
            pass
    assert len(deadlines) == 1
    assert len(deadlines._waiting) <= MIN_ENDED + 1
    patient.cancel()
    await asyncio.wait([patient])


async def test_one_that_ended_does_not_hold_up_the_next() -> None:
    deadlines = Deadlines(time.monotonic)
    with deadlines.until(time.monotonic() + 0.01):
        pass
    assert await wait_until(deadlines, 0.03) == "over"
    assert len(deadlines) == 0


async def test_other_errors_and_cancellations_pass() -> None:
    deadlines = Deadlines(time.monotonic)
    with pytest.raises(ValueError, match="mine"), deadlines.until(time.monotonic() + LONG_S):
        raise ValueError("mine")
    with pytest.raises(asyncio.CancelledError), deadlines.until(time.monotonic() + LONG_S):
        raise asyncio.CancelledError
    assert len(deadlines) == 0


async def test_a_timeout_within_ends_that_alone() -> None:
    deadlines = Deadlines(time.monotonic)
    with deadlines.until(time.monotonic() + LONG_S):
        assert await wait_until(deadlines, 0.0) == "over"
        await asyncio.sleep(0)
    assert len(deadlines) == 0
