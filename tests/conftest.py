"""For every test: hypothesis draws the same examples each time, however slow the machine is, and
an assertion that fails in a helper shows its values, too."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest
import uvloop
from hypothesis import settings

pytest.register_assert_rewrite("tests.faults", "tests.integration", "tests.unit")
settings.register_profile("baton", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("baton")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the loop that the router runs on: it fails otherwise than asyncio's own."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_finish() -> None:
    """What all tests import stays to the end: the collector need not look through it each time."""
    gc.collect()
    gc.freeze()
