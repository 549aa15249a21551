"""Whether another attempt follows one that failed, and after which pause.

Bounded in failures and in deaths since the last new token: a request that gets on may outlive any
number of workers, one that kills them is not given to a third. The pause grows with every failure
and is jittered. It waits for nothing itself.
"""

from __future__ import annotations

import logging
import random

from protocol.errors import GenerationFailed
from router.requests.attempt import Generation
from router.settings import RouterSettings

log = logging.getLogger(__name__)

MAX_DEATHS = 2
"""A request that was lost with so many workers in a row, and got no token on, is suspected."""


class Retries:
    """The rule for all generations of a router."""

    def __init__(self, settings: RouterSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng

    def count(self, generation: Generation, reason: str) -> float:
        """Seconds to wait before the next attempt, after one more failure for this reason.

        Raises GenerationFailed if there may be no other.
        """
        name = generation.request.request_id
        if generation.num_deaths >= MAX_DEATHS:
            raise GenerationFailed(
                f"request {name} is not tried again: {generation.num_deaths} workers died over it; "
                f"the last: {reason}"
            )
        generation.num_failures += 1
        if generation.num_failures >= self._settings.max_attempts:
            raise GenerationFailed(
                f"request {name} failed after {generation.num_attempts} attempts; "
                f"the last: {reason}"
            )
        log.info("request %s is tried again: %s", name, reason)
        backoff_ms: float = self._settings.retry_backoff_ms * 2 ** (generation.num_failures - 1)
        backoff_ms = min(backoff_ms, self._settings.retry_backoff_max_ms)
        return backoff_ms / 1000 * self._rng.uniform(0.5, 1.0)
