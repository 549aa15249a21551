"""The parts of a worker process that both roles share: engine, sockets, transfers, reports.

Waits for input and answers the messages that every worker answers. Owns the worker's lifecycle, its
steps, its counters and the peers that it may write to. The role's loop uses these services; all of
them belong to the loop's thread.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace

import zmq

from engine.engine import Engine
from engine.kv_pool import KvPool
from kv_transfer.handoff.key import Named
from kv_transfer.service import TransferService
from kv_transfer.tiers.kv_tiers import KvTiers
from kv_transfer.transfer_loop import ServiceFailed, TransferEvent
from process.clock import Clock
from process.flight_recorder import FlightRecorder
from process.lifecycle import StopSignal
from process.logs import about
from process.sockets.control import ControlServer, Peer
from process.sockets.encrypted_sockets import Network
from process.wakeup import Wakeup
from protocol.control_message import ControlMessage
from protocol.errors import TransferError
from protocol.events import WorkerStats
from protocol.field_bounds import MAX_REASON_CHARS
from protocol.flight import FlightKind
from protocol.handoff_messages import PeerDescriptor
from protocol.message_base import Message
from protocol.messages import (
    AttemptFailed,
    CacheDumpRequest,
    FlightPage,
    FlightRequest,
    Hello,
    Role,
    SetLimits,
)
from protocol.registration import WorkerInfo, WorkerState
from protocol.weight_messages import WeightsMessage
from worker.admitting_routers import Admissions
from worker.cache_dumps import CacheDumps
from worker.counters import Count
from worker.intake import Intake
from worker.lifecycle import Lifecycle
from worker.probes import ReadinessCheck
from worker.reporter import HandoffLoad, Reporter
from worker.settings import WorkerSettings
from worker.stall_watch import StallAlarm
from worker.step_runner import StepRunner
from worker.tiers.loads import TierLoads
from worker.transfer_peers import TransferPeers
from worker.weights.server import WeightsServer

log = logging.getLogger(__name__)

IDLE_WAIT_MS = 50
"""The longest wait for input. Messages, transfers and grammars wake the worker at once."""


@dataclass(frozen=True)
class Surroundings:
    """The objects besides the host that a role may need."""

    network: Network
    hello: Hello
    descriptor: PeerDescriptor
    is_alive: Callable[[str, str], bool]
    find: Callable[[str, str], WorkerInfo | None]
    members: Callable[[], Collection[WorkerInfo]]
    look_again: Callable[[], None]
    machine: str
    stack: ExitStack
    add_check: Callable[[ReadinessCheck], None]


@dataclass(frozen=True)
class WorkerParts:
    """The parts of a host; the code that made them closes them."""

    engine: Engine
    pool: KvPool
    transfers: TransferService
    server: ControlServer
    reporter: Reporter
    intake: Intake
    admissions: Admissions
    wakeup: Wakeup
    stop: StopSignal
    clock: Clock
    announce: Callable[[WorkerState], None]
    tiers: KvTiers | None = None


class WorkerHost:
    """The services of one worker process."""

    def __init__(self, settings: WorkerSettings, worker_id: str, parts: WorkerParts) -> None:
        scheduler = parts.engine.scheduler
        self.settings = settings
        self.worker_id = worker_id
        self.engine = parts.engine
        self.transfers = parts.transfers
        self.server = parts.server
        self.intake = parts.intake
        self.clock = parts.clock
        self.counters = parts.reporter.counters
        self.planned_chunk = scheduler.config.chunk_max_tokens
        self.admissions = parts.admissions
        self.poller = zmq.Poller()
        self.flight = FlightRecorder(parts.clock.now, parts.clock.wall_us)
        self.steps = StepRunner(parts.engine, self.counters, self.flight)
        self.lifecycle = Lifecycle(
            worker_id, parts.stop, parts.announce, settings.drain_grace_s, parts.clock.now
        )
        secret = settings.cluster_secret.encode()
        self.transfer_peers = TransferPeers(parts.transfers, parts.pool, secret, self.counters)
        self.stall_alarm = StallAlarm(
            scheduler, self.counters, self.lifecycle, settings.stall_alarm_s
        )
        self.tiers = TierLoads(parts.tiers, scheduler, self.counters, parts.clock)
        self._reporter = parts.reporter
        if self.tiers.is_on:
            self._reporter.watch_tiers(self.tiers)
        self._dumps = CacheDumps(parts.reporter.dump)
        self._wakeup = parts.wakeup
        self._weights: WeightsServer | None = None
        self.poller.register(self.server.socket, zmq.POLLIN)
        self.poller.register(self._wakeup.fileno(), zmq.POLLIN)

    def send_weights(self, server: WeightsServer) -> None:
        """Let `server` answer workers that want our weights."""
        self._weights = server

    # -- the loop ---------------------------------------------------------------------------

    def latest_stats(self) -> WorkerStats:
        """The last reported load."""
        return self._reporter.latest()

    def reincarnate(self) -> None:
        """Register with the fleet as a new incarnation; no work of the old one may be left."""
        incarnation = uuid.uuid4().hex
        self.server.reincarnate(incarnation)
        self._reporter.reincarnate(incarnation)
        self.admissions.start_over()
        self.lifecycle.register_again(incarnation)
        self.counters.add(Count.LAPSES)
        self.flight.note(FlightKind.FLEET, text="its lease lapsed")
        log.warning("registered again as incarnation %s", incarnation)

    def wait(self) -> None:
        """Wait for input; after a step that computed something, return at once. Wakes during such
        steps stay pending until the next real wait."""
        if self.steps.is_busy:
            return
        self.poller.poll(IDLE_WAIT_MS)
        self._wakeup.clear()

    def publish(self, load: HandoffLoad) -> None:
        """Report load and cache if due."""
        self.counters.add_up_to(
            Count.FRAMES_REFUSED,
            "server",
            sum(self.server.refused.values()) + self.server.num_ended,
        )
        self.counters.add_up_to(Count.STALE_MESSAGES, "handoffs", load.num_ignored)
        self.counters.add_up_to(Count.PEERS_TURNED_AWAY, "handshakes", self.server.num_turned_away)
        self._reporter.publish(self.clock.now(), load)
        if self._weights is not None:
            for peer, message in self._weights.take_answers():
                self.send(peer, message)

    # -- for the role's handlers ------------------------------------------------------------

    def watch_prefill(self, is_lost: Callable[[], bool]) -> None:
        """Report from now on whether no prefill worker can be reached."""
        self._reporter.watch_prefill(is_lost)

    def watch_refusals(self, refusals: Callable[[], dict[str, str]]) -> None:
        """Report from now on which workers refuse our pool."""
        self._reporter.watch_refusals(refusals)

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message. If that fails, count it; `server.lost` soon reports the peer."""
        if not self.server.send(peer, message):
            self.counters.add(Count.UNDELIVERABLE_MESSAGES)

    def failure(
        self,
        attempt: Named,
        reason: str,
        retryable: bool,
        lacks_room: bool = False,
        code: str = "",
        trace_id: str = "",
    ) -> AttemptFailed:
        """The message that ends an attempt; also logs and records the failure. With a `code` the
        failure is not retryable."""
        name, number = attempt.request_id, attempt.attempt
        self.flight.note(FlightKind.FAILED, (name, number), text=reason)
        line = "attempt %d of request %s failed: %s"
        log.info(line, number, name, reason, extra=about(name, trace_id))
        return AttemptFailed(
            request_id=attempt.request_id,
            attempt=attempt.attempt,
            worker_id=self.worker_id,
            reason=reason[:MAX_REASON_CHARS],
            retryable=retryable and not code,
            lacks_room=lacks_room,
            code=code,
        )

    def answer_common(self, peer: Peer, message: ControlMessage) -> None:
        """Answer a message that any worker may get; count and drop any other message."""
        if isinstance(message, CacheDumpRequest):
            if peer.role is Role.ROUTER:
                self.admissions.note(peer.name)
            self.send(peer, self._dumps.piece(peer, message, self.server.peers))
            return
        if isinstance(message, SetLimits) and peer.role is Role.ROUTER:
            self._set_limits(message)
            return
        if isinstance(message, FlightRequest) and peer.role is Role.ROUTER:
            self.send(peer, self._flight_page(message))
            return
        if isinstance(message, WeightsMessage) and self._weights is not None:
            self._weights.handle(peer, message)
            return
        self.note_unexpected(peer.name, message)

    def note_unexpected(self, sender: str, message: ControlMessage) -> None:
        """Count a message that its sender must not send here; logs the 1st, 2nd, 4th, 8th, ..."""
        self.counters.add(Count.UNEXPECTED_MESSAGES)
        count = self.counters[Count.UNEXPECTED_MESSAGES]
        if count.bit_count() == 1:
            log.warning(
                "%s sent an unexpected %s (%d so far)", sender, type(message).__name__, count
            )

    def _flight_page(self, asked: FlightRequest) -> FlightPage:
        events, after = self.flight.page(
            asked.after, asked.request_id, asked.since_us, asked.until_us
        )
        return FlightPage(nonce=asked.nonce, after=after, events=events)

    def _set_limits(self, message: SetLimits) -> None:
        """Take new limits, as far as memory allows. A card's memory was planned for the first chunk
        size, so on a card chunks can only shrink."""
        scheduler, settings = self.engine.scheduler, self.settings
        config = scheduler.config
        chunk = message.chunk_max_tokens or config.chunk_max_tokens
        if settings.device != "cpu":
            chunk = min(chunk, self.planned_chunk)
        chunk = max(chunk, config.chunk_min_tokens, config.block_size)
        itl_target_s = config.itl_target_s
        if message.itl_target_ms is not None and message.itl_target_ms > 0:
            itl_target_s = message.itl_target_ms / 1e3
        scheduler.config = replace(config, chunk_max_tokens=chunk, itl_target_s=itl_target_s)
        self.lifecycle.amend(chunk, itl_target_s * 1e3)
        log.info("steps have chunks of %d tokens, target %g ms", chunk, itl_target_s * 1e3)

    def follow_common(self, event: TransferEvent) -> None:
        """Handle a transfer event that any worker may get. Raises TransferError if the transfer
        thread died."""
        if isinstance(event, ServiceFailed):
            raise TransferError(event.reason)
        log.debug("transfer thread: %s", event)
