"""The time in which a router that is told to stop still serves, but reports itself as not ready.

Load balancers need seconds to learn that a router leaves. Meanwhile they send it connections, and
refusing those would lose requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class LameDuck:
    """The wait between the request to stop and the last accepted connection; `lasts_s` may be 0."""

    def __init__(self, lasts_s: float) -> None:
        self._lasts_s = lasts_s
        self._has_begun = False

    async def wait(
        self,
        told_to_stop: asyncio.Event,
        may_leave: asyncio.Event,
        on_begin: Callable[[], object],
    ) -> None:
        """Call `on_begin` when told to stop, and set `may_leave` once the time has passed."""
        await told_to_stop.wait()
        self._has_begun = True
        if self._lasts_s:
            on_begin()
            log.info("told to stop: not ready, but still serving for %g s", self._lasts_s)
            await asyncio.sleep(self._lasts_s)
        may_leave.set()

    def not_ready_reason(self) -> str | None:
        """Why the router is not ready once it has been told to stop; None before."""
        return "the router is stopping" if self._has_begun else None
