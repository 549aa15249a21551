"""Background tasks, whose failure must not end the process that serves requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from protocol.errors import ConfigError, ModelLoadError

log = logging.getLogger(__name__)

RESTART_S = 1.0


async def keep_running(what: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a task until it returns. If it fails, log the error, and run it again after a pause.
    Raises ConfigError and ModelLoadError, which another run would only repeat."""
    while True:
        try:
            await run()
        except (ConfigError, ModelLoadError):
            raise
        except Exception:
            log.exception("%s failed and starts again in %g s", what, RESTART_S)
            await asyncio.sleep(RESTART_S)
        else:
            return


async def run_together(*works: Coroutine[Any, Any, None]) -> None:
    """Run until all have ended. If one fails or this is cancelled, end the others, too."""
    tasks = [asyncio.create_task(each) for each in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
