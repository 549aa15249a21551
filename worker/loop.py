"""The loop of a worker: receive, schedule, compute, deliver. Both roles run it.

A task begins with a router's message and ends with its last token here; on a prefill worker, that
is the first token after the prompt. The messages determine what the loop does; the role says which
messages it admits and what happens to a task's blocks and tokens. Everything happens in the thread
that calls `run`.
"""

from __future__ import annotations

import logging
from typing import Generic, Protocol

from engine.step_result import StepResult
from kv_transfer.handoff.key import HandoffKey, key_of
from kv_transfer.transfer_loop import OfPeers
from process.sockets.control import Peer
from protocol.control_message import ControlMessage
from protocol.errors import RequestError
from protocol.flight import FlightKind
from protocol.handoff_messages import (
    CacheAsk,
    CacheOffer,
    KvAsk,
    KvFetch,
    KvGrant,
    KvRenew,
    PeerDescriptor,
)
from protocol.messages import Abort, NewAttempt, Role
from protocol.traces import ChunkSpan
from scheduling.batch import Batch
from scheduling.sequence import Sequence
from worker.counters import Count
from worker.host import WorkerHost
from worker.outbound import OutboundHandoffs
from worker.reporter import HandoffLoad
from worker.tasks import AnyTask, Tasks

log = logging.getLogger(__name__)


class CacheMoves(Protocol):
    """Cached blocks that move when a worker drains: `worker.inbound.moving_caches`."""

    def handle(self, peer: Peer, message: CacheOffer | CacheAsk) -> None:
        """Handle a message of a worker that offers its cache or asks for ours."""

    def lose(self, peer: Peer) -> None:
        """Note that a connection is gone."""

    def sweep(self, is_busy: bool, is_serving: bool) -> None:
        """Take the next steps; `is_busy`: requests are here; `is_serving`: peers fetch blocks."""


class WorkerRole(Protocol[AnyTask]):
    """The part of the loop that differs between roles."""

    tasks: Tasks[AnyTask]
    outbound: OutboundHandoffs

    @property
    def caches(self) -> CacheMoves:
        """The cached blocks that move when a worker drains."""

    @property
    def num_jobs(self) -> int:
        """Number of jobs to finish before the worker may end."""

    @property
    def is_sending(self) -> bool:
        """Whether handoffs that this worker sends are open."""

    @property
    def waits_for_others(self) -> bool:
        """Whether requests wait for another worker that is alive and busy."""

    # -- receive

    def admits(self, message: NewAttempt) -> bool:
        """Whether the role accepts such attempts."""

    def is_known(self, key: HandoffKey) -> bool:
        """Whether this attempt is here or was here before."""

    def open(self, router: Peer, message: NewAttempt, sequence: Sequence) -> None:
        """Add the task of an attempt whose sequence the scheduler has accepted."""

    def refuse(self, key: HandoffKey, reason: str) -> None:
        """Note that the attempt does not start here. The caller tells its router."""

    def drop(self, task: AnyTask) -> None:
        """End a task that nobody wants any more."""

    def drop_all(self) -> None:
        """End all tasks: others may consider this worker dead and no longer expect results."""

    def handle(self, peer: Peer, message: ControlMessage) -> bool:
        """Handle a message of the role's own; False if it is none."""

    def lose(self, peer: Peer) -> None:
        """End the work of a router or another peer that is gone."""

    def poll_peers(self) -> None:
        """Read from peers and end overdue tasks, before the events of transfers."""

    def land(self, event: OfPeers) -> None:
        """Note blocks that have landed in our pool."""

    def sweep(self) -> None:
        """Act on timeouts, after the events of transfers."""

    # -- schedule and deliver

    def begin(self, batch: Batch) -> None:
        """Prepare for the batch that runs next."""

    def deliver(self, result: StepResult) -> None:
        """Pass on the blocks and tokens of a step that has run."""

    def fail(self, task: AnyTask, reason: str, retryable: bool, code: str = "") -> None:
        """End an attempt that fails here; `code` as in AttemptFailed."""

    def flush(self) -> None:
        """Send what is queued for routers."""

    def load(self) -> HandoffLoad:
        """The current handoffs."""

    def holders(self) -> list[str]:
        """The holders of blocks, one line each, for people."""

    def end(self) -> None:
        """Tell the routers of unfinished work, because the process ends."""


class WorkerLoop(Generic[AnyTask]):
    """The loop of one worker: steps of its engine, and between them messages, transfers and its
    role."""

    def __init__(self, host: WorkerHost, role: WorkerRole[AnyTask]) -> None:
        self._host = host
        self._clock = host.clock
        self._role = role

    def run(self) -> None:
        """Serve until the process is told to stop and no jobs are left."""
        while not self._host.lifecycle.is_finished(self._role.num_jobs):
            self.turn()
        self._role.end()

    def turn(self) -> None:
        """Run one turn of the loop. Blocks that have arrived are published before a step, which may
        be long."""
        self._receive()
        batch = self._host.engine.plan()
        self._begin(batch)
        self._publish()
        outcome = self._host.steps.run(batch)
        for result in outcome.results:
            self._deliver(result)
        for sequence in outcome.failed:
            self._fail(sequence, outcome.reason, retryable=not outcome.is_their_fault)
        self._role.flush()

    # -- receive ----------------------------------------------------------------------------

    def _receive(self) -> None:
        host, role = self._host, self._role
        host.wait()
        if host.lifecycle.has_lapsed:
            role.drop_all()
            if not role.is_sending:
                host.reincarnate()
        for peer, message in host.server.receive():
            self._try_handle(peer, message)
        for peer in host.server.lost(self._clock.now()):
            role.lose(peer)
            role.outbound.lose(peer)
            role.caches.lose(peer)
        role.poll_peers()
        for event in host.transfers.drain():
            if isinstance(event, OfPeers):
                role.land(event)
            else:
                role.outbound.follow(event)
        role.sweep()
        role.outbound.sweep()
        role.caches.sweep(len(role.tasks) > 0, len(role.outbound.served) > 0)
        host.tiers.turn()

    def _try_handle(self, peer: Peer, message: ControlMessage) -> None:
        """Handle a peer's message. A message that cannot be handled ends the peer's connection and
        its work here, and nothing else."""
        try:
            self._handle(peer, message)
        except Exception:
            log.exception("cannot handle a %s of %s", type(message).__name__, peer.name)
            self._host.server.drop(peer)

    def _handle(self, peer: Peer, message: ControlMessage) -> None:
        match message:
            case NewAttempt() if peer.role is Role.ROUTER and self._role.admits(message):
                self._start(peer, message)
            case PeerDescriptor() | KvAsk() | KvGrant() | KvFetch() | KvRenew() | Abort() if (
                peer.role is not Role.ROUTER
            ):
                self._role.outbound.handle(peer, message)
            case CacheOffer() | CacheAsk() if peer.role is not Role.ROUTER:
                self._role.caches.handle(peer, message)
            case _:
                if not self._role.handle(peer, message):
                    self._host.answer_common(peer, message)

    def _start(self, router: Peer, message: NewAttempt) -> None:
        """Start a new attempt; older attempts at the same request end. An attempt that is or was
        here already is not started again."""
        host, role, key = self._host, self._role, key_of(message)
        others = role.tasks.of_request(key.request_id)
        if role.is_known(key) or any(other.attempt > key.attempt for other in others):
            host.counters.add(Count.STALE_MESSAGES)
            return
        for other in others:
            role.drop(other)
        host.flight.note(FlightKind.RECEIVED, key, tokens=len(message.token_ids))
        if host.lifecycle.is_draining or host.lifecycle.has_lapsed:
            self._refuse(router, message, "the worker stops", retryable=True)
            role.refuse(key, "the worker stops")
            return
        try:
            sequence = host.intake.sequence(message, self._clock.now())
            host.engine.scheduler.add(sequence)
        except (RequestError, ValueError) as error:
            self._refuse(router, message, str(error), retryable=False)
            return
        role.open(router, message, sequence)

    def _refuse(self, router: Peer, message: NewAttempt, reason: str, retryable: bool) -> None:
        trace_id = message.trace_id
        failure = self._host.failure(message, reason, retryable, trace_id=trace_id)
        self._host.send(router, failure)

    # -- schedule ---------------------------------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        """End expired tasks, and let the role prepare for the batch."""
        for sequence in batch.expired:
            self._fail(sequence, "its deadline passed", retryable=False)
        self._role.begin(batch)

    # -- deliver ----------------------------------------------------------------------------

    def _deliver(self, result: StepResult) -> None:
        started, ended = self._clock.wall_us(result.started), self._clock.wall_us(result.ended)
        host = self._host
        for chunk in result.batch.chunks:
            task = self._role.tasks.find_of(chunk.sequence)
            if task is None:
                continue
            number = chunk.num_tokens
            task.note_chunk(ChunkSpan(started, ended, number), host.counters[Count.STEPS])
            span = (result.started, result.ended)
            host.flight.note_span(*span, FlightKind.CHUNK, task.asked, tokens=number)
            host.counters.add(Count.PREFILL_TOKENS, number)
        self._role.deliver(result)
        for sequence, failure in result.failed:
            self._fail(sequence, failure.reason, retryable=True, code=failure.code)

    def _fail(self, sequence: Sequence, reason: str, retryable: bool, code: str = "") -> None:
        """End an attempt whose step failed or whose time is over; the worker keeps running."""
        task = self._role.tasks.find_of(sequence)
        if task is not None:
            self._role.fail(task, reason, retryable, code)

    def _publish(self) -> None:
        role = self._role
        load = role.load()
        self._host.publish(load)
        now = self._clock.now()
        self._host.stall_alarm.update(now, role.holders, lambda: role.waits_for_others)
