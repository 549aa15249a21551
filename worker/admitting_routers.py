"""The routers that have admitted this worker. Orchestrators end an old worker once a new one is
ready, so a new worker is ready only when every live router can send it requests.

A router that has admitted a worker asks at once for a dump of its cache. Routers whose lease has
ended do not count. Without any router the worker is ready at once: routers do not wait for workers
to be ready, so a whole fleet can start at once. A worker that all routers have admitted stays
ready when another router starts, because the earlier routers can still send it requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

log = logging.getLogger(__name__)


class Admissions:
    """The worker's thread notes admissions; the probes' threads read what is missing."""

    def __init__(self, live_routers: Callable[[], Collection[str]]) -> None:
        """`live_routers` returns the names of the routers whose leases hold; it must not block."""
        self._live_routers = live_routers
        self._routers: frozenset[str] = frozenset()
        self._awaited: list[str] = []
        self._are_complete = False

    def note(self, router: str) -> None:
        """Note that a router has admitted this worker."""
        self._routers |= {router}

    def start_over(self) -> None:
        """Forget all admissions: the worker is a new incarnation."""
        self._routers, self._are_complete = frozenset(), False

    def missing(self) -> str | None:
        """The live routers that have not admitted the worker yet, in words; None if all have."""
        if self._are_complete:
            return None
        awaited = sorted(set(self._live_routers()) - self._routers)
        if not awaited:
            self._are_complete = True
            log.info("ready: admitted by %s", ", ".join(sorted(self._routers)) or "no router yet")
            return None
        reason = f"not admitted yet by {', '.join(awaited)}"
        if awaited != self._awaited:
            self._awaited = awaited
            log.info("%s", reason)
        return reason
