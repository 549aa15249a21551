"""A router over fake workers, for tests of the router and of the console."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.unit.router.router_harness import Harness


@pytest.fixture
async def make_harness() -> AsyncIterator[Callable[..., Harness]]:
    """Harnesses that must be clean when the test ends."""
    made: list[Harness] = []

    def make(**settings) -> Harness:
        made.append(Harness(**settings))
        return made[-1]

    yield make
    for harness in made:
        assert harness.dispatcher.inflight == 0
        assert harness.traces.num_running == 0
        assert harness.metric("inflight") == 0
        for worker_id in harness.workers:
            worker = harness.fleet.worker(worker_id)
            assert worker is None or worker.num_reservations == 0
        await harness.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
def harness(make_harness) -> Harness:
    return make_harness()
