"""A fleet of fake workers that leaves no task behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.unit.router.router_harness import Harness


@pytest.fixture
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    made = Harness(**getattr(request, "param", {}))
    yield made
    await made.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
