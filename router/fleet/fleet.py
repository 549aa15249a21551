"""The workers that this router uses: which ones exist, their load, their cached blocks.

Owns one `Worker` (and its link) per usable registration, and the cache index. The membership
watcher supplies the members. A worker is dead when another incarnation has registered, or when its
registration is gone and it does not answer; a worker that is only slow, or only missing from the
registry, is alive. `router.fleet.election` decides what the fleet serves. A worker with another
model is refused, and the log names both models once. Knows no requests: the fleet passes workers'
messages and losses to its listener.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from protocol.control_message import ControlMessage
from protocol.events import CacheEvents, EventMessage
from protocol.messages import CacheDump, FlightPage, Role
from protocol.registration import WorkerInfo, WorkerState
from router.fleet.conditions import (
    NOT_USED_YET,
    Condition,
    Conditions,
    State,
    StoreState,
    lost_conditions,
    registered_condition,
)
from router.fleet.election import FleetIdentity, WantedModel, elect
from router.fleet.flight_questions import FlightQuestions
from router.fleet.history import FleetHistory
from router.fleet.listener import FleetListener, LinkCallbacks
from router.fleet.worker import Link, Loss, Worker, describe
from router.metrics import FleetMetrics
from router.routing.barriers import ApartPair
from router.routing.caches.cache_index import CacheIndex
from router.routing.fleet_view import FleetView

log = logging.getLogger(__name__)


_OWN_MESSAGES = frozenset((CacheDump, FlightPage))
"""The control messages that the fleet takes itself."""
ConnectLink = Callable[[WorkerInfo, LinkCallbacks], Link]


class Fleet:
    """Workers by id. Everything runs on one event loop."""

    def __init__(
        self,
        connect: ConnectLink,
        index: CacheIndex,
        metrics: FleetMetrics,
        clock: Callable[[], float],
        history: FleetHistory,
    ) -> None:
        """`clock` is in seconds, such as `time.monotonic`."""
        self.history = history
        self.identity: FleetIdentity | None = None
        self.flights = FlightQuestions()
        self.store_state: Callable[[], StoreState] = StoreState
        """The state of the store; set by the owner of its connection."""
        self._connect = connect
        self._index = index
        self._view = FleetView(index)
        self._metrics = metrics
        self.now = clock
        """The time by the clock of the view."""
        self._listener: FleetListener | None = None
        self._workers: dict[str, Worker] = {}
        self._liveness_until = -inf  # unless a link's readiness changes
        self._members: dict[str, WorkerInfo] = {}
        self._max_context: int | None = None
        self._refused: dict[str, Condition] = {}  # by incarnation
        self._conditions = Conditions(self.history.wall_us)
        self._wanted = WantedModel("")
        self._closing: list[Link] = []
        self._changed = asyncio.Event()

    def want(self, wanted: WantedModel) -> None:
        """Serve only workers of this checkpoint. Call it before the first `update`."""
        self._wanted = wanted

    def listen(self, listener: FleetListener) -> None:
        """Set the listener; call this before the first `update`."""
        self._listener = listener

    def update(self, members: Mapping[str, WorkerInfo]) -> None:
        """Update the workers from the current registrations."""
        self._members = dict(members)
        self.history.note_members(members)
        self.sweep()
        present = {info.incarnation for info in members.values()}
        self._refused = {each: why for each, why in self._refused.items() if each in present}
        self._elect(members)
        for info in members.values():
            worker = self._workers.get(info.worker_id)
            if worker is not None and worker.info.incarnation != info.incarnation:
                self._lose(info.worker_id, "it was restarted", Loss.SILENT)
                worker = None
            if worker is None:
                self._add(info)
            else:
                worker.renew(info)
        self._find_max_context()
        self._note_change()

    def sweep(self) -> None:
        """Drop workers whose lease has ended and that do not answer. Call it periodically.

        A worker that answers stays: a restarted registry is empty until all workers are back.
        """
        now = self.now()
        for worker_id, worker in list(self._workers.items()):
            link = worker.link
            answers = (link.is_ready or link.is_ending) and link.is_responsive(now)
            if worker_id not in self._members and not answers:
                self._lose(worker_id, "its lease ended", Loss.SILENT)
        for worker_id in self._index.overdue(now):
            self._workers[worker_id].link.send(self._index.next_piece(worker_id))
        self._note_change()

    def tidy_index(self) -> bool:
        """Index or forget a slice of the large caches of workers that come or go. Call it
        periodically. Returns whether there is more to do."""
        return self._index.tidy(self.now())

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

    def info(self, worker_id: str) -> WorkerInfo | None:
        """The registration with this id, whether or not the router uses the worker."""
        return self._members.get(worker_id)

    def view(self) -> FleetView:
        """The fleet as decisions see it, with what the links show now."""
        now = self.now()
        if now >= self._liveness_until:
            workers = self._workers.values()
            self._liveness_until = min([each.update_liveness(now) for each in workers], default=inf)
        return self._view

    def ready(self, role: Role) -> list[Worker]:
        """Workers of a role that accept new requests; see `FleetView.ready`."""
        return [self._workers[each.worker_id] for each in self.view().ready(role)]

    def known(self, role: Role) -> list[Worker]:
        """All workers of a role, connected or not."""
        return [each for each in self._workers.values() if each.role is role]

    def holders(self, digest: bytes) -> list[str]:
        """The workers that hold a block."""
        return self._index.holders(digest)

    @property
    def max_context(self) -> int | None:
        """The most tokens that a decode worker accepts, whether or not it is ready; None without
        decode workers. Placement knows each worker's limit. Draining workers count only if all
        drain."""
        return self._max_context

    def not_ready_reason(self) -> str | None:
        """Why no request can be served now; None if some can."""
        if self.ready(Role.DECODE):
            return None
        standing = [
            f"{worker_id} is {condition}"
            for worker_id, (info, condition) in self._found().items()
            if info.role is Role.DECODE
        ]
        reason = "no decode worker is registered"
        if standing:
            reason = f"no decode worker is ready: {', '.join(sorted(standing))}"
        trouble = self.store_state().trouble
        return reason if trouble is None else f"{reason}; {trouble}"

    def conditions(self) -> dict[str, Condition]:
        """The condition of every worker that is registered, connected, or was lost, by id."""
        found = self._found()
        self._conditions.note(found)
        usable_us = {
            role: self._conditions.usable_us(
                name for name, (info, _) in found.items() if info.role is role
            )
            for role in (Role.PREFILL, Role.DECODE)
        }
        lost = [each for each in self.history.lost() if each.info.worker_id not in found]
        return lost_conditions(lost, usable_us) | self._conditions.all()

    def condition(self, info: WorkerInfo) -> Condition:
        """The condition of a registered worker now."""
        worker = self._workers.get(info.worker_id)
        if info.incarnation in self._refused:
            return self._refused[info.incarnation]
        if worker is not None and worker.info.incarnation == info.incarnation:
            return worker.condition(self.now(), self.history.wall_us())
        return registered_condition(info.state) or NOT_USED_YET

    def _found(self) -> dict[str, tuple[WorkerInfo, Condition]]:
        infos = {name: worker.info for name, worker in self._workers.items()} | self._members
        return {name: (info, self.condition(info)) for name, info in infos.items()}

    async def wait_for_decode(self, min_context: int = 0) -> None:
        """Wait until a ready decode worker accepts `min_context` tokens. The caller sets the
        timeout."""
        while not any(e.info.max_context >= min_context for e in self.ready(Role.DECODE)):
            self._changed.clear()
            await self._changed.wait()

    def why_apart(self, source: str, sink: str) -> str:
        """Why a worker cannot write to the pool of another; "" if nothing is known against it."""
        return self._view.pairs.barriers.why(source, sink)

    def apart(self) -> list[ApartPair]:
        """The usable prefill workers that cannot hand over to a usable decode worker."""
        usable = {each.worker_id for each in self._workers.values() if each.takes_requests}
        pairs = self._view.pairs.barriers.pairs()
        return [each for each in pairs if each.source in usable and each.sink in usable]

    def workers(self) -> list[Worker]:
        """All workers that the router uses."""
        return list(self._workers.values())

    def as_json(self) -> list[dict[str, Any]]:
        """The members as `/fleet` shows them, including loading and refused ones."""
        known = {name: worker.info for name, worker in self._workers.items()} | self._members
        members = sorted(known.values(), key=lambda each: (each.role, each.worker_id))
        workers = [(info, self._workers.get(info.worker_id)) for info in members]
        conditions = self.conditions()
        return [
            {
                **(worker.as_json() if worker else describe(info, None, is_connected=False)),
                "condition": conditions[info.worker_id].as_json(),
            }
            for info, worker in workers
        ]

    # -- reports from links -----------------------------------------------------------------

    def on_ready(self, worker_id: str) -> None:
        """A worker accepted a link's hello: request a dump of its cached blocks."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.broken_us = worker.requests_moved = 0
            log.info("connected to %s worker %s", worker.role.value, worker_id)
            worker.link.send(self._index.new_dump(worker_id))
            self._note_change()

    def on_readiness(self) -> None:
        """Look at all links again with the next decision."""
        self._liveness_until = -inf

    def on_disconnected(self, worker_id: str) -> None:
        """A link broke and will reconnect. The worker may live, but its attempts are lost."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        log.log(_severity(worker), "the connection to %s broke", worker_id)
        if worker_id not in self._members:
            self._lose(worker_id, "its lease ended and its connection broke", Loss.BROKEN)
        elif self._listener is not None:
            worker.broken_us = self.history.wall_us()
            worker.requests_moved = self._listener.on_lost(
                worker, "its connection broke", Loss.BROKEN
            )
        self._note_change()

    def on_control(self, worker_id: str, message: ControlMessage) -> None:
        """A message arrived over a worker's control link."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        if type(message) not in _OWN_MESSAGES:
            if self._listener is not None:
                self._listener.on_message(worker, message)
        elif isinstance(message, CacheDump):
            wanted = self._index.take_piece(worker_id, message)
            if wanted is not None:
                worker.link.send(wanted)
        elif isinstance(message, FlightPage):
            self.flights.answer(worker, message)

    def on_event(self, worker_id: str, message: EventMessage) -> None:
        """A worker published a message, which must name the worker we subscribed to."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        named = (message.worker_id, message.incarnation)
        if named != (worker_id, worker.info.incarnation):
            self._metrics.refused.add("foreign")
        elif isinstance(message, CacheEvents):
            worker.evicted_blocks += len(message.removed)
            if self._index.apply_events(message):
                self._metrics.cache_gaps.inc()
                worker.link.send(self._index.new_dump(worker_id))
        else:
            self._view.take_stats(worker, message)
            if self._index.check_seq(*named, message.cache_seq):
                self._metrics.cache_gaps.inc()
                worker.link.send(self._index.new_dump(worker_id))

    # -- membership -------------------------------------------------------------------------

    def _elect(self, members: Mapping[str, WorkerInfo]) -> None:
        """Decide what this fleet serves; decide again once no worker serves the former model."""
        identity = self.identity
        if identity is not None and (
            self._workers or any(identity.refusal_of(each) is None for each in members.values())
        ):
            return
        self.identity = elect(self._wanted, members.values()) or identity

    def _add(self, info: WorkerInfo) -> None:
        """Connect to a worker, unless the worker is still loading or cannot be used."""
        if info.state is WorkerState.LOADING:
            return
        refusal = self._wanted.refusal_of(info)
        if refusal is None and self.identity is not None:
            refusal = self.identity.refusal_of(info)
        if refusal is not None:
            if info.incarnation not in self._refused:
                self._refused[info.incarnation] = refusal
                log.error("worker %s is not used: %s", info.worker_id, refusal.reason)
            return
        if self.identity is None:
            return
        self._refused.pop(info.incarnation, None)
        worker = Worker(info, self._connect(info, self))
        self._view.join(worker)
        self._workers[info.worker_id] = worker
        self._liveness_until = -inf

    def _lose(self, worker_id: str, reason: str, loss: Loss) -> None:
        worker = self._workers.pop(worker_id)
        self._find_max_context()
        self._disconnect(worker)
        self._view.leave(worker_id)
        self._metrics.workers_lost.inc()
        message = "%s worker %s left: %s"
        log.log(_severity(worker), message, worker.role.value, worker_id, reason)
        moved = worker.requests_moved
        if self._listener is not None:
            moved += self._listener.on_lost(worker, reason, loss)
        self.history.note_lost(worker.info, reason, moved)

    def _find_max_context(self) -> None:
        """Compute `max_context` again after a change of members; every request reads it."""
        known = self.known(Role.DECODE)
        staying = [each for each in known if each.info.state is not WorkerState.DRAINING]
        self._max_context = max((each.info.max_context for each in staying or known), default=None)

    def _disconnect(self, worker: Worker) -> None:
        worker.link.close()
        self._closing = [each for each in self._closing if not each.is_closed]
        self._closing.append(worker.link)

    def _note_change(self) -> None:
        self._changed.set()
        found = self._found()
        self._conditions.note(found)
        usable = [info.role for info, each in found.values() if each.state is State.USABLE]
        for role in (Role.PREFILL, Role.DECODE):
            self._metrics.workers.labels(role.value).set(usable.count(role))
        if self._listener is not None:
            self._listener.on_fleet()


def _severity(worker: Worker) -> int:
    """The log level for a lost worker: INFO if the worker drains, since its end is expected."""
    return logging.INFO if worker.info.state is WorkerState.DRAINING else logging.WARNING
