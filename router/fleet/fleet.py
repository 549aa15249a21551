"""The workers that this router uses: which ones exist, their load, their cached blocks.

Owns one `Worker` (and its link) per usable registration, and the cache index. Members come from
the membership watcher. A worker is dead when another incarnation registered, or when its
registration is gone and it does not answer; being slow, or missing from the registry, is not
enough. The first READY worker decides what the fleet serves. A worker that differs is refused,
and the log names both values once. Knows no requests: the fleet passes workers' messages and
losses to its listener.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protocol.errors import IncompatiblePeer
from protocol.events import CacheEvents, EventMessage
from protocol.messages import PROTOCOL_VERSION, CacheDump, CacheDumpRequest, ControlMessage, Role
from protocol.registration import WorkerInfo, WorkerState
from router.fleet.cache_index import CacheIndex
from router.fleet.link import LinkCallbacks
from router.fleet.metrics import FleetMetrics
from router.fleet.worker import Link, Loss, Worker, describe
from router.routing.view import WorkerLoad

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FleetIdentity:
    """The properties that all workers of the fleet share."""

    model: str
    model_fingerprint: str
    layout_fingerprint: str
    block_size: int

    def check(self, info: WorkerInfo) -> None:
        """Raises IncompatiblePeer, with both values, for a worker that cannot be used."""
        for what, ours, theirs in (
            ("protocol version", str(PROTOCOL_VERSION), str(info.protocol_version)),
            ("model fingerprint", self.model_fingerprint, info.model_fingerprint),
            ("KV layout fingerprint", self.layout_fingerprint, info.layout_fingerprint),
        ):
            if ours != theirs:
                raise IncompatiblePeer(what, ours, theirs)


class FleetListener(Protocol):
    """Receives workers' messages about requests, and news of changed or lost workers."""

    def on_message(self, worker: Worker, message: ControlMessage) -> None:
        """A worker sent a message about a request."""
        ...

    def on_fleet(self) -> None:
        """Workers came, went, or changed their state or load; may be called repeatedly."""
        ...

    def on_lost(self, worker: Worker, reason: str, loss: Loss) -> None:
        """A worker, or the connection to it, is gone; every attempt there ends now."""
        ...


ConnectLink = Callable[[WorkerInfo, LinkCallbacks], Link]


class Fleet:
    """Workers by id. Everything runs on one event loop."""

    def __init__(
        self,
        connect: ConnectLink,
        index: CacheIndex,
        metrics: FleetMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity: FleetIdentity | None = None
        self._connect = connect
        self._index = index
        self._metrics = metrics
        self._clock = clock
        self._listener: FleetListener | None = None
        self._workers: dict[str, Worker] = {}
        self._members: dict[str, WorkerInfo] = {}
        self._refused: set[str] = set()
        self._closing: list[Link] = []
        self._changed = asyncio.Event()

    def listen(self, listener: FleetListener) -> None:
        """Set the listener; call this before the first `update`."""
        self._listener = listener

    def update(self, members: Mapping[str, WorkerInfo]) -> None:
        """Bring the workers in line with the current registrations."""
        self._members = dict(members)
        self.sweep()
        self._refused &= {info.incarnation for info in members.values()}
        self._elect(members)
        for info in members.values():
            worker = self._workers.get(info.worker_id)
            if worker is not None and worker.info.incarnation != info.incarnation:
                self._lose(info.worker_id, "it was restarted", Loss.SILENT)
                worker = None
            if worker is None:
                self._add(info)
            else:
                worker.info = info
        self._note_change()

    def sweep(self) -> None:
        """Drop workers whose lease ended and that do not answer; called periodically.

        A worker that answers stays: a restarted registry is empty until all workers are back.
        """
        now = self._clock()
        for worker_id, worker in list(self._workers.items()):
            answers = worker.link.is_ready and worker.link.is_responsive(now)
            if worker_id not in self._members and not answers:
                self._lose(worker_id, "its lease ended", Loss.SILENT)
        self._note_change()

    async def close(self) -> None:
        """Close every link and wait until their tasks and sockets are gone."""
        for worker in self._workers.values():
            self._disconnect(worker)
        self._workers.clear()
        for link in self._closing:
            await link.wait_closed()
        self._closing.clear()

    def worker(self, worker_id: str) -> Worker | None:
        """The worker with this id, if the router uses it now."""
        return self._workers.get(worker_id)

    def ready(self, role: Role) -> list[Worker]:
        """Workers that new requests may go to.

        A slow worker is not a dead one: workers that do not answer at the moment are left out
        only if others answer.
        """
        usable = [
            each
            for each in self._workers.values()
            if each.info.role is role and each.takes_requests
        ]
        if len(usable) < 2:
            return usable
        now = self._clock()
        return [each for each in usable if each.link.is_responsive(now)] or usable

    def known(self, role: Role) -> list[Worker]:
        """All workers of a role, connected or not."""
        return [each for each in self._workers.values() if each.role is role]

    def loads(self, role: Role, hashes: Sequence[bytes]) -> list[WorkerLoad]:
        """The load of each ready worker, and how many of these prompt blocks it holds."""
        now = self._clock()
        return [
            each.load(self._index.match(each.worker_id, hashes, now)) for each in self.ready(role)
        ]

    def expect_cached(self, worker_id: str, hashes: Sequence[bytes]) -> None:
        """Expect a worker to hold these blocks: a prompt of them is being sent there."""
        self._index.expect(worker_id, hashes, self._clock())

    @property
    def max_context(self) -> int | None:
        """Tokens that every ready decode worker accepts; None if no worker is ready."""
        return min((each.info.max_context for each in self.ready(Role.DECODE)), default=None)

    def not_ready_reason(self) -> str | None:
        """Why nothing can be served now; None if something can."""
        if self.ready(Role.DECODE):
            return None
        known = [each for each in self._workers.values() if each.role is Role.DECODE]
        if known:
            states = ", ".join(f"{each.worker_id} is {each.info.state.value}" for each in known)
            return f"no decode worker is ready: {states}"
        return "no decode worker is registered"

    async def wait_for_decode(self) -> None:
        """Wait until a decode worker is ready; the caller sets the timeout."""
        while not self.ready(Role.DECODE):
            self._changed.clear()
            await self._changed.wait()

    def as_json(self) -> list[dict[str, Any]]:
        """The members as `/fleet` shows them, including those that load or are refused."""
        known = {name: worker.info for name, worker in self._workers.items()} | self._members
        members = sorted(known.values(), key=lambda each: (each.role, each.worker_id))
        workers = [(info, self._workers.get(info.worker_id)) for info in members]
        return [
            worker.as_json() if worker else describe(info, None, is_connected=False)
            for info, worker in workers
        ]

    # -- reports from links -----------------------------------------------------------------

    def on_ready(self, worker_id: str) -> None:
        """A link's hello was accepted: request a dump of the worker's cached blocks."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            log.info("connected to %s worker %s", worker.role.value, worker_id)
            worker.link.send(CacheDumpRequest())
            self._note_change()

    def on_disconnected(self, worker_id: str) -> None:
        """A link broke and will reconnect. The worker may live, but its attempts are lost."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        log.log(_severity(worker), "the connection to %s broke", worker_id)
        if worker_id not in self._members:
            self._lose(worker_id, "its lease ended and its connection broke", Loss.BROKEN)
        elif self._listener is not None:
            self._listener.on_lost(worker, "its connection broke", Loss.BROKEN)
        self._note_change()

    def on_control(self, worker_id: str, message: ControlMessage) -> None:
        """A message arrived over a worker's control link."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        if isinstance(message, CacheDump):
            if self._index.apply_dump(worker_id, message):
                worker.link.send(CacheDumpRequest())
        elif self._listener is not None:
            self._listener.on_message(worker, message)

    def on_event(self, worker_id: str, message: EventMessage) -> None:
        """A worker published a message, which must name the worker we subscribed to."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        named = (message.worker_id, message.incarnation)
        if named != (worker_id, worker.info.incarnation):
            self._metrics.refused.labels("foreign").inc()
        elif isinstance(message, CacheEvents):
            if self._index.apply_events(message):
                self._metrics.cache_gaps.inc()
                worker.link.send(CacheDumpRequest())
        else:
            worker.take_stats(message)

    # -- membership -------------------------------------------------------------------------

    def _elect(self, members: Mapping[str, WorkerInfo]) -> None:
        """Decide what this fleet serves; decide again once no worker serves the former."""
        identity = self.identity
        if identity is not None and (
            self._workers or any(_agrees(identity, each) for each in members.values())
        ):
            return
        for info in members.values():
            if info.state is WorkerState.READY and info.protocol_version == PROTOCOL_VERSION:
                self.identity = FleetIdentity(
                    info.model, info.model_fingerprint, info.layout_fingerprint, info.block_size
                )
                return

    def _add(self, info: WorkerInfo) -> None:
        """Connect to a worker, unless it is still loading or cannot be used."""
        if self.identity is None or info.state is WorkerState.LOADING:
            return
        try:
            self.identity.check(info)
        except IncompatiblePeer as error:
            if info.incarnation not in self._refused:
                self._refused.add(info.incarnation)
                log.error("worker %s is not used: %s", info.worker_id, error)
            return
        self._index.join(info.worker_id, info.incarnation)
        self._workers[info.worker_id] = Worker(info, self._connect(info, self))

    def _lose(self, worker_id: str, reason: str, loss: Loss) -> None:
        worker = self._workers.pop(worker_id)
        self._disconnect(worker)
        self._index.leave(worker_id)
        self._metrics.workers_lost.inc()
        message = "%s worker %s left: %s"
        log.log(_severity(worker), message, worker.role.value, worker_id, reason)
        if self._listener is not None:
            self._listener.on_lost(worker, reason, loss)

    def _disconnect(self, worker: Worker) -> None:
        worker.link.close()
        self._closing = [each for each in self._closing if not each.is_closed]
        self._closing.append(worker.link)

    def _note_change(self) -> None:
        self._changed.set()
        for role in (Role.PREFILL, Role.DECODE):
            usable = [each for each in self._workers.values() if each.takes_requests]
            count = sum(each.role is role for each in usable)
            self._metrics.workers.labels(role.value).set(count)
        if self._listener is not None:
            self._listener.on_fleet()


def _severity(worker: Worker) -> int:
    """The log level for a lost worker: INFO if the worker drains, since its end is expected."""
    return logging.INFO if worker.info.state is WorkerState.DRAINING else logging.WARNING


def _agrees(identity: FleetIdentity, info: WorkerInfo) -> bool:
    try:
        identity.check(info)
    except IncompatiblePeer:
        return False
    return True
