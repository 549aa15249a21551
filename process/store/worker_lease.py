"""A worker's lease on its registration, kept by a thread of its own.

Built on `process.store.registry` and `process.store.id_claim`. The store may go away at any time:
the lease is renewed when the store is back.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import redis
from redis.exceptions import RedisError, ResponseError

from process.store.drain_requests import RESUME
from process.store.id_claim import GRACE_S, IdClaim, holder_name, is_registration, refusal
from process.store.ignored_entries import DRAIN_REQUEST, ROUTER, IgnoredEntries
from process.store.registry import (
    BACKOFF_MAX_S,
    BACKOFF_S,
    FleetView,
    Registry,
    client_from_url,
    expiry_of,
)
from process.store.router_leases import read_routers
from protocol.addresses import shown_address
from protocol.registration import WorkerInfo, WorkerState

log = logging.getLogger(__name__)

_MAX_DRAIN_BYTES = 1024
_CLAIM_POLL_S = 0.05


class WorkerLease:
    """Keeps a worker registered from its own thread, however long the worker's steps are.

    Registration waits until the store answers and no other registration under our id may belong to
    a live process. When another live process holds our id, from the start or since our lease ended,
    `refusal` is set to a line that names the process, and all attempts end.

    `lapses` counts how often our registration had disappeared. If the store lost its memory, we
    register again. Otherwise our lease ended because this process stood still, or because the store
    let it end early, and others may have taken us for dead: `has_lapsed` is set, and we stay
    unregistered until the owner has dropped all work for others and calls `register_again`.
    `is_asked_to_drain` is set when an operator asks us to drain. `ignored` has the entries of the
    store that could not be decoded. Owns its connection and thread.
    """

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        info: WorkerInfo,
        lease_s: float,
        grace_s: float = GRACE_S,
    ) -> None:
        """Connects to nothing yet. `grace_s`: see `id_claim.GRACE_S`. Raises ConfigError for a
        malformed URL."""
        self.lapses = 0
        self.has_lapsed = False
        self.refusal: str | None = None
        self.is_asked_to_drain = False
        self._where = shown_address(redis_url)
        self._client = client_from_url(redis.Redis, redis_url, max(lease_s / 2, 0.5))
        self._expiry = expiry_of(self._client)
        self._cluster = cluster
        self._registry = Registry(cluster)
        self._lease_s = lease_s
        self._grace_s = grace_s
        self._info = info
        self._claim: IdClaim | None = IdClaim(info, grace_s)  # None while we are registered
        self.ignored = IgnoredEntries()
        self._view = FleetView(ignored=self.ignored)
        self._routers: frozenset[str] = frozenset()
        self._epoch = b""  # the epoch of the store that last held our registration
        self._is_reachable: bool | None = None
        self._asked_at = self._renewed_at = -math.inf
        self._is_stopping = False
        self._is_changed = False
        self._on_registered: Callable[[], None] = lambda: None
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="baton-lease", daemon=True)

    def start(self, on_registered: Callable[[], None] = lambda: None) -> None:
        """Register as soon as the store is reachable and our id is free, and stay registered.
        `on_registered` is called once, from our thread."""
        self._on_registered = on_registered
        self._thread.start()

    def update(self, state: WorkerState) -> None:
        """Announce a new state soon."""
        self._change(state=state)

    def amend(self, chunk_max_tokens: int, itl_target_ms: float) -> None:
        """Announce new limits of our steps soon."""
        self._change(chunk_max_tokens=chunk_max_tokens, itl_target_ms=itl_target_ms)

    def look_again(self) -> None:
        """Read the fleet again soon."""
        self._change()

    def note_start(self, start_ms: dict[str, int]) -> None:
        """Announce soon how long the phases of our start took."""
        self._change(start_ms=start_ms)

    def register_again(self, incarnation: str) -> None:
        """Register again after a lapse, as a new incarnation."""
        with self._condition:
            self._info = msgspec.structs.replace(self._info, incarnation=incarnation)
            self._claim = IdClaim(self._info, self._grace_s)
            self.has_lapsed = False
            self._is_changed = True
            self._condition.notify_all()

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for our registration. Returns whether we are registered."""
        with self._condition:
            return self._condition.wait_for(lambda: self._claim is None, timeout_s)

    @property
    def is_registered(self) -> bool:
        """Whether our registration is in place, as far as we know. Never blocks."""
        return self._claim is None and not self.has_lapsed and self.refusal is None

    def is_alive(self, worker_id: str, incarnation: str) -> bool:
        """Whether another worker may be alive, by the last view of the fleet. Never blocks.

        Always True while the store is away, because nothing proves then that a worker is dead.
        """
        return not self._is_reachable or self.find(worker_id, incarnation) is not None

    def find(self, worker_id: str, incarnation: str) -> WorkerInfo | None:
        """Another worker's registration in the last view of the fleet. Never blocks."""
        info = self._view.members.get(worker_id)
        return info if info is not None and info.incarnation == incarnation else None

    def members(self) -> Collection[WorkerInfo]:
        """Every worker in the last view of the fleet, including this one. Never blocks."""
        return self._view.members.values()

    def routers(self) -> Collection[str]:
        """The names of routers that held a lease when the store answered last. Never blocks."""
        return self._routers

    def holds_until(self) -> float:
        """The time until which others certainly see our lease, in seconds of `time.monotonic`.

        Infinite while the store is known to be away: then no worker sees another's lease end.
        """
        return self._renewed_at + self._lease_s if self._is_reachable else math.inf

    def close(self) -> None:
        """Leave the fleet at once and announce this; returns when the thread has ended."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def _change(self, **fields: Any) -> None:
        with self._condition:
            self._info = msgspec.structs.replace(self._info, **fields)
            self._is_changed = True
            self._condition.notify_all()

    def _run(self) -> None:
        backoff = BACKOFF_S
        while self.refusal is None:
            try:
                if not self.has_lapsed:
                    self._ask()
                pause, backoff = self._pause_s(), BACKOFF_S
            except (RedisError, OSError) as error:
                self._note_away(error)
                pause, backoff = backoff, min(2 * backoff, BACKOFF_MAX_S, self._lease_s / 3)
            with self._condition:
                self._condition.wait_for(lambda: self._is_stopping or self._is_changed, pause)
                self._is_changed = False
                if self._is_stopping:
                    break
        self._leave()

    def _ask(self) -> None:
        """Register, or renew our registration."""
        with self._condition:
            info, claim = self._info, self._claim
        asked_before, asked_at = self._asked_at, time.monotonic()
        self._asked_at = asked_at
        pipeline = self._client.pipeline(transaction=False)
        if claim is None:
            pipeline.eval(*self._registry.renew(info, self._lease_s))
        else:
            pipeline.eval(*self._registry.claim(info, self._lease_s, claim.replaces))
        pipeline.eval(*self._registry.read())
        pipeline.getrange(self._registry.drain_key(info.worker_id), 0, _MAX_DRAIN_BYTES)
        pipeline.eval(*read_routers(self._cluster))
        registered, fleet = self._take(info, pipeline.execute(raise_on_error=False))
        former, is_ours, left_ms = registered
        answered_at = time.monotonic()
        if is_ours:
            self._renewed_at, self._epoch = asked_at, fleet[0]
            with self._condition:
                is_new, self._claim = claim is not None, None
                self._condition.notify_all()
            if is_new:
                on_registered, self._on_registered = self._on_registered, lambda: None
                on_registered()
        elif claim is None:
            # This process may also have stood still between asking and the answer.
            stood_still = answered_at - asked_before > self._lease_s
            is_overwritten = former is not None and not is_registration(info.worker_id, former)
            was_forgotten = (fleet[0] != self._epoch or is_overwritten) and not stood_still
            self._find_lost(None if is_overwritten else former, was_forgotten)
        else:
            if claim.note_holder(former, left_ms / 1e3, asked_at, answered_at):
                what = "taking the id over from" if claim.replaces else "waiting for the lease of"
                log.info("%s: %s %s", info.worker_id, what, holder_name(former))
            self.refusal = claim.refusal

    def _take(self, info: WorkerInfo, answers: list[Any]) -> tuple[Any, Any]:
        """Take the answers; returns those about our registration, and the fleet. Raises
        RedisError."""
        registered, fleet, asked_to_drain, routers = answers
        if isinstance(asked_to_drain, ResponseError):
            self.ignored.note(DRAIN_REQUEST, info.worker_id, b"", asked_to_drain)
            asked_to_drain = b""
        for each in (registered, fleet, asked_to_drain, routers):
            if isinstance(each, Exception):
                raise each
        self._routers = self._names_of(routers)
        self._view.take(fleet, time.monotonic())
        if self._is_reachable is False:
            log.info("%s is back", self._where)
        self._expiry.log_warning(self._where, time.time())
        self._is_reachable = True
        if asked_to_drain == info.incarnation.encode():
            self.is_asked_to_drain = True
        elif asked_to_drain == RESUME + info.incarnation.encode():
            self.is_asked_to_drain = False
        return registered, fleet

    def _names_of(self, routers: list[bytes]) -> frozenset[str]:
        names = set()
        for each in routers:
            try:
                names.add(each.decode())
            except UnicodeDecodeError as error:
                self.ignored.note(ROUTER, repr(each), b"", error)
        return frozenset(names)

    def _find_lost(self, former: bytes | None, was_forgotten: bool) -> None:
        """Handle the loss of our registration. Restore it if the store forgot it, but not if our
        lease lapsed, even if another process has taken the id since."""
        if former is not None and not was_forgotten:
            self.refusal = refusal(self._info.worker_id, former)
            return
        self.lapses += 1
        if former is None and not was_forgotten and self._view.is_settled(time.monotonic()):
            self.has_lapsed = True
            log.error("the lease of %s ended %s", self._info.worker_id, self._why_ended())
            return
        log.warning("the store forgot %s; registering it again", self._info.worker_id)
        with self._condition:
            self._claim = IdClaim(self._info, self._grace_s, is_to_restore=was_forgotten)

    def _why_ended(self) -> str:
        if time.monotonic() > self.holds_until():
            return "while this process stood still"
        return "early: the store's clock was set forward, or the store deleted our registration"

    def _pause_s(self) -> float:
        claim = self._claim
        if claim is None:
            return self._lease_s / 3
        return 0.0 if claim.may_succeed_now else _CLAIM_POLL_S

    def _note_away(self, error: Exception) -> None:
        self._client.connection_pool.disconnect()  # the store's name may lead elsewhere by now
        self._view.interrupted()
        if self._is_reachable is not False:
            log.warning("cannot reach %s, still trying: %s", self._where, error)
        self._is_reachable = False

    def _leave(self) -> None:
        if self._claim is not None or self.refusal is not None:
            return
        try:
            self._client.eval(*self._registry.leave(self._info))
        except (RedisError, OSError) as error:
            log.warning("could not leave the fleet; the lease will expire: %s", error)
