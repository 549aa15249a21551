"""The lifecycle of a worker: serving, stalled, draining or lapsed.

Follows the stop signal and the registration, and announces each change to the fleet. Other threads
may read `turned_at`, `is_draining` and `is_stalled`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from process.lifecycle import StopSignal
from protocol.registration import WorkerState

log = logging.getLogger(__name__)


class Membership(Protocol):
    """Our place in the fleet, as `process.store.worker_lease.WorkerLease` keeps it."""

    has_lapsed: bool
    refusal: str | None
    is_asked_to_drain: bool

    def register_again(self, incarnation: str) -> None:
        """Join the fleet again after a lapse."""

    def amend(self, chunk_max_tokens: int, itl_target_ms: float) -> None:
        """Announce new limits of our steps."""


class Lifecycle:
    """The life of one worker; belongs to the loop's thread. `now` is seconds of its clock."""

    def __init__(
        self,
        worker_id: str,
        stop: StopSignal,
        announce: Callable[[WorkerState], None],
        drain_grace_s: float,
        now: Callable[[], float],
    ) -> None:
        self.is_draining = False
        """Whether the worker was told to stop and takes no new requests."""
        self.is_stalled = False
        """Whether requests wait without any progress."""
        self.turned_at = now()
        """The time of the loop's last turn."""
        self._worker_id = worker_id
        self._stop = stop
        self._announce = announce
        self._drain_grace_s = drain_grace_s
        self._now = now
        self._drains_as_asked = False
        self._membership: Membership | None = None

    def join(self, membership: Membership) -> None:
        """Follow the state of our registration, which exists from now on."""
        self._membership = membership

    def is_finished(self, num_jobs: int) -> bool:
        """Whether the loop may end: the worker was told to stop, and no jobs are left or the grace
        period is over.

        The first call after the stop signal announces the drain, so that routers send no new
        requests. The loop turns at least once after that.
        """
        self.turned_at = self._now()
        member = self._membership
        if member is not None and (member.is_asked_to_drain or member.refusal):
            self._stop.request()
            self._drains_as_asked = member.is_asked_to_drain
        elif self._drains_as_asked and self._stop.withdraw():
            self._drains_as_asked = self.is_draining = False
            self._announce(WorkerState.READY)
            log.info("%s was asked to drain, and is now asked to go on", self._worker_id)
        if self._stop.since is None:
            return False
        if not self.is_draining:
            self.is_draining = True
            self._announce(WorkerState.DRAINING)
            log.info("%s is to stop: %d requests to finish", self._worker_id, num_jobs)
            return False
        grace_over = self._now() - self._stop.since >= self._drain_grace_s
        return num_jobs == 0 or grace_over

    def set_stalled(self, is_stalled: bool) -> None:
        """Announce that the worker stalls, or that it runs again."""
        self.is_stalled = is_stalled
        if not is_stalled:
            log.warning("%s goes on", self._worker_id)
        if not self.is_draining:
            self._announce(WorkerState.STALLED if is_stalled else WorkerState.READY)

    @property
    def has_lapsed(self) -> bool:
        """Whether others may consider us dead. If so, the owner drops their requests, then
        reincarnates."""
        return self._membership is not None and self._membership.has_lapsed

    def register_again(self, incarnation: str) -> None:
        """Join the fleet again after a lapse."""
        assert self._membership is not None
        self._membership.register_again(incarnation)

    def amend(self, chunk_max_tokens: int, itl_target_ms: float) -> None:
        """Announce new limits of our steps."""
        if self._membership is not None:
            self._membership.amend(chunk_max_tokens, itl_target_ms)
