"""Waits for what nothing announces: asks again and again, up to a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_S = 60.0
POLL_S = 0.005


def until(check: Callable[[], object]) -> None:
    """Waits until `check` gives something true. Raises AssertionError after a minute."""
    deadline = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s in vain"
        time.sleep(POLL_S)


async def until_in_thread(check: Callable[[], object]) -> None:
    """`until` with checks that block, beside the tasks of the event loop."""
    await asyncio.to_thread(until, check)
