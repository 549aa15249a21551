"""The parts of a worker process that both roles share: engine, sockets, transfers, reports.

Waits for input, runs steps and answers the messages that every worker answers. The role's loop
uses these services and tells the host only the number of its requests. All methods belong to the
loop's thread.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

import zmq

from engine.engine import Engine
from engine.kv_pool import KvPool, block_digest
from engine.runner import TOO_SLOW
from engine.step_result import StepResult
from kv_transfer.authentication import verify_descriptor
from kv_transfer.handoff.key import Named
from kv_transfer.service import TransferService
from kv_transfer.transfer_loop import ServiceFailed, TransferEvent
from process.clock import wall_us
from process.flight_recorder import FlightRecorder
from process.lifecycle import StopSignal
from process.logs import about
from process.sockets.control import ControlServer, Peer
from process.wakeup import Wakeup
from protocol.errors import ProtocolError, TransferError
from protocol.events import WorkerStats
from protocol.flight import FlightKind
from protocol.messages import (
    AttemptFailed,
    CacheDumpRequest,
    ControlMessage,
    FlightPage,
    FlightRequest,
    Message,
    PeerDescriptor,
    Role,
    SetLimits,
    WeightsMessage,
)
from protocol.registration import WorkerState
from scheduling.batch import Batch
from scheduling.sequence import Sequence
from worker.admissions import Admissions
from worker.cache_dumps import CacheDumps
from worker.counters import Count
from worker.intake import Intake
from worker.reporter import Reporter
from worker.settings import WorkerSettings
from worker.stall_watch import StallWatch
from worker.weights.server import WeightsServer

log = logging.getLogger(__name__)

IDLE_WAIT_MS = 50
"""Between two looks at the clock. Messages, transfers and grammars wake the worker at once."""


class Membership(Protocol):
    """Our place in the fleet, as `process.store.membership.WorkerLease` keeps it."""

    has_lapsed: bool
    refusal: str | None
    is_asked_to_drain: bool

    def register_again(self, incarnation: str) -> None:
        """Come back after a lapse."""

    def amend(self, chunk_max_tokens: int, itl_target_ms: float) -> None:
        """Announce new limits of our steps."""


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a planned batch: results, and sequences whose step raised.

    `reason` says why these `failed`. `is_their_fault` means that other sequences of the same batch
    ran, so the failed ones would fail on any worker.
    """

    results: list[StepResult]
    failed: list[Sequence] = field(default_factory=list)
    is_their_fault: bool = False
    reason: str = ""


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
    announce: Callable[[WorkerState], None]


class WorkerHost:
    """The services of one worker process."""

    def __init__(self, settings: WorkerSettings, worker_id: str, parts: WorkerParts) -> None:
        self.settings = settings
        self.worker_id = worker_id
        self.engine = parts.engine
        self.transfers = parts.transfers
        self.server = parts.server
        self.intake = parts.intake
        self.planned_chunk = parts.engine.scheduler.config.chunk_max_tokens
        self.admissions = parts.admissions
        self.poller = zmq.Poller()
        self.flight = FlightRecorder(lambda: self.now(), lambda: self.wall_us())
        self._pool = parts.pool
        self._reporter = parts.reporter
        self._dumps = CacheDumps(parts.reporter.dump)
        self._wakeup = parts.wakeup
        self._stop = parts.stop
        self._announce = parts.announce
        self._descriptors: dict[str, PeerDescriptor] = {}  # verified ones, by agent
        self._transfer_peers: set[str] = set()  # agents that the transport knows
        self._totals: Counter[str] = Counter()
        self._is_busy = False
        self._membership: Membership | None = None
        self._weights: WeightsServer | None = None
        self._is_draining = self._drains_as_asked = False
        self._turned_at = time.monotonic()
        self._stall_watch = StallWatch(settings.stall_alarm_s)
        self.poller.register(self.server.socket, zmq.POLLIN)
        self.poller.register(self._wakeup.fileno(), zmq.POLLIN)

    def join(self, membership: Membership) -> None:
        """Follow the state of our registration from now on; before this call there is none."""
        self._membership = membership

    def send_weights(self, server: WeightsServer) -> None:
        """Let `server` answer workers that ask for our weights."""
        self._weights = server

    # -- the loop ---------------------------------------------------------------------------

    def is_finished(self, num_jobs: int) -> bool:
        """Whether the loop may end: told to stop, and no jobs left or the grace period over.

        The first call after the stop signal announces the drain, so that routers send no new
        requests.
        """
        self._turned_at = self.now()
        member = self._membership
        if member is not None and (member.is_asked_to_drain or member.refusal):
            self._stop.request()
            self._drains_as_asked = member.is_asked_to_drain
        elif self._drains_as_asked and self._stop.withdraw():
            self._drains_as_asked = self._is_draining = False
            self._announce(WorkerState.READY)
            log.info("%s was asked to drain, and now to go on", self.worker_id)
        if self._stop.since is None:
            return False
        if not self._is_draining:
            self._is_draining = True
            self._announce(WorkerState.DRAINING)
            log.info("%s is to stop: %d requests to finish", self.worker_id, num_jobs)
        grace_over = self.now() - self._stop.since >= self.settings.drain_grace_s
        return num_jobs == 0 or grace_over

    @property
    def is_draining(self) -> bool:
        """Whether the worker was told to stop and takes no new requests."""
        return self._is_draining

    @property
    def turned_at(self) -> float:
        """When the loop turned last, by `now`. Any thread may ask, as for the next two."""
        return self._turned_at

    @property
    def is_stalled(self) -> bool:
        """Whether requests wait and nothing happens, see `watch_progress`."""
        return self._stall_watch.is_stalled

    def latest_stats(self) -> WorkerStats:
        """The last reported load."""
        return self._reporter.latest()

    @property
    def has_lapsed(self) -> bool:
        """Whether others may take us for dead: drop their requests, then `reincarnate`."""
        return self._membership is not None and self._membership.has_lapsed

    def reincarnate(self) -> None:
        """Register with the fleet as a new incarnation; no work of the old one may be left."""
        assert self._membership is not None
        incarnation = uuid.uuid4().hex
        self.server.reincarnate(incarnation)
        self._reporter.reincarnate(incarnation)
        self.admissions.start_over()
        self._membership.register_again(incarnation)
        self.count(Count.LAPSES)
        self.flight.note(FlightKind.FLEET, text="its lease lapsed")
        log.warning("registered again as incarnation %s", incarnation)

    def wait(self) -> None:
        """Wait for input; return at once after a step that computed something. Wakes during such
        steps stay pending for the first real wait."""
        if self._is_busy:
            return
        self.poller.poll(IDLE_WAIT_MS)
        self._wakeup.clear()

    def run_step(self, batch: Batch) -> StepOutcome:
        """Run a planned batch. If it raises, run its members one by one, so that a poisonous one
        fails alone. If all fail, or there was only one, the worker may be to blame. One step ahead,
        either of two steps may be to blame: both are withdrawn, and the next plan runs by itself.
        """
        self._is_busy = not batch.is_empty or self.engine.is_ahead
        self.count(Count.PREEMPTIONS, len(batch.preempted))
        for sequence in batch.preempted:
            self.flight.note(FlightKind.PREEMPTED, sequence.key)
        self.count(Count.MASK_WAITS, len(batch.held))
        result, reason = self._try_run(batch, self.engine.run)
        if result is not None:
            return StepOutcome([result])
        if self.engine.try_withdraw():
            return StepOutcome([])
        members = batch.split()
        if len(members) == 1:
            return StepOutcome([], batch.sequences, reason=reason)
        outcomes = [(each, *self._try_run(each, self.engine.run_alone)) for each in members]
        results = [result for _, result, _ in outcomes if result is not None]
        failed = [member.sequences[0] for member, result, _ in outcomes if result is None]
        reason = next((reason for _, _, reason in outcomes if reason), "")
        return StepOutcome(results, failed, is_their_fault=bool(results), reason=reason)

    def _try_run(
        self, batch: Batch, run: Callable[[Batch], StepResult]
    ) -> tuple[StepResult | None, str]:
        """The result, or None and the reason; the error is logged."""
        try:
            result = run(batch)
        except Exception as error:  # the top of a task: an engine error must not end the worker
            log.exception("a step failed: %s", [sequence.key for sequence in batch.sequences])
            self.count(Count.FAILED_STEPS)
            return None, f"its step failed on the worker: {type(error).__name__}"
        if not result.batch.is_empty or result.failed:
            self.count(Count.STEPS)
            rows, tokens = len(result.batch.decodes), result.batch.num_chunk_tokens
            self.count(Count.DECODE_ROWS, rows)
            span = (result.started, result.ended)
            self.flight.note_span(*span, FlightKind.STEP, number=rows, tokens=tokens)
            if result.batch.chunks:
                budget = self.engine.scheduler.config.chunk_max_tokens
                self.count(Count.CHUNK_BUDGET_TOKENS, budget)
            failures = [failure for _, failure in result.failed]
            self.count(Count.FAILED_ROWS, sum(not each.code for each in failures))
            self.count(Count.SLOW_GRAMMARS, failures.count(TOO_SLOW))
        return result, ""

    def publish(
        self, num_handoffs: int, num_ignored: int, blocks_stuck: int = 0, blocks_fenced: int = 0
    ) -> None:
        """Report load and cache if due; `num_ignored` is the number of messages so far about
        unknown handoffs, `blocks_stuck` and `blocks_fenced` as in `WorkerStats`."""
        self.count_up_to(Count.FRAMES_REFUSED, "server", sum(self.server.refused.values()))
        self.count_up_to(Count.STALE_MESSAGES, "handoffs", num_ignored)
        self.count_up_to(Count.PEERS_TURNED_AWAY, "handshakes", self.server.num_turned_away)
        self._reporter.publish(self.now(), num_handoffs, blocks_stuck, blocks_fenced)
        if self._weights is not None:
            for peer, message in self._weights.take_answers():
                self.send(peer, message)

    def watch_progress(
        self, holders: Callable[[], list[str]], waits_for_others: Callable[[], bool] = lambda: False
    ) -> None:
        """Called every turn: raise or end the alarm that this worker stands still. `holders` says
        what holds its blocks, one line each. While it `waits_for_others` that live and are busy,
        it does not stand still."""
        scheduler = self.engine.scheduler
        steps = self._reporter.counters[Count.STEPS]
        progress = (steps, scheduler.blocks.num_moves)

        def waits() -> bool:
            return scheduler.num_held_up > 0 and not waits_for_others()

        if not self._stall_watch.look(self.now(), progress, waits):
            return
        state = WorkerState.STALLED if self._stall_watch.is_stalled else WorkerState.READY
        if self._stall_watch.is_stalled:
            self.count(Count.STALLS)
            log.error(
                "%d requests wait, and for %g s nothing was computed, granted or released; %d of "
                "%d blocks are free; held are:%s",
                scheduler.num_held_up,
                self.settings.stall_alarm_s,
                scheduler.blocks.num_free,
                scheduler.blocks.num_blocks,
                "".join(f"\n  {line}" for line in holders()) or " none",
            )
        else:
            log.warning("%s goes on", self.worker_id)
        if not self._is_draining:
            self._announce(state)

    # -- for the role's handlers ------------------------------------------------------------

    def now(self) -> float:
        """Seconds of the monotonic clock, the clock that the engine measures steps with."""
        return time.monotonic()

    def wall_us(self, monotonic_s: float | None = None) -> int:
        """Microseconds of the Unix epoch now, or at a reading of `now`."""
        ago_s = 0.0 if monotonic_s is None else self.now() - monotonic_s
        return wall_us() - round(ago_s * 1e6)

    def watch_prefill(self, is_lost: Callable[[], bool]) -> None:
        """Report from now on whether no prefill worker can be reached."""
        self._reporter.watch_prefill(is_lost)

    @property
    def num_steps(self) -> int:
        """Steps so far that computed something."""
        return self._reporter.counters[Count.STEPS]

    def count(self, name: Count, number: int = 1) -> None:
        """Add to one of the counters that load reports carry."""
        self._reporter.counters[name] += number

    def count_up_to(self, name: Count, source: str, total: int) -> None:
        """Add the growth of `total`, kept by `source`, since the last call."""
        self.count(name, total - self._totals[source])
        self._totals[source] = total

    def send(self, peer: Peer, message: Message) -> None:
        """Send, or count as undeliverable: `server.lost` soon reports the peer."""
        if not self.server.send(peer, message):
            self.count(Count.UNDELIVERABLE_MESSAGES)

    def failure(
        self,
        attempt: Named,
        reason: str,
        retryable: bool,
        lacks_room: bool = False,
        code: str = "",
        trace_id: str = "",
    ) -> AttemptFailed:
        """The message that ends an attempt, which is also logged and recorded; with a `code` it is
        not retryable."""
        name, number = attempt.request_id, attempt.attempt
        self.flight.note(FlightKind.FAILED, (name, number), text=reason)
        line = "attempt %d of request %s failed: %s"
        log.info(line, number, name, reason, extra=about(name, trace_id))
        return AttemptFailed(
            request_id=attempt.request_id,
            attempt=attempt.attempt,
            worker_id=self.worker_id,
            reason=reason,
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
        self.count(Count.UNEXPECTED_MESSAGES)
        log.warning("%s %s sent an unexpected %s", peer.role, peer.name, type(message).__name__)

    def _flight_page(self, asked: FlightRequest) -> FlightPage:
        events, after = self.flight.page(
            asked.after, asked.request_id, asked.since_us, asked.until_us
        )
        return FlightPage(nonce=asked.nonce, after=after, events=events)

    def _set_limits(self, message: SetLimits) -> None:
        """Take new limits, as far as our memory allows: a card's was planned for the chunks of the
        start, so there they can only shrink."""
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
        if self._membership is not None:
            self._membership.amend(chunk, itl_target_s * 1e3)
        log.info("steps have chunks of %d tokens, target %g ms", chunk, itl_target_s * 1e3)

    def follow_common(self, event: TransferEvent) -> None:
        """Handle a transfer event that any worker may get. Raises TransferError if the transfer
        thread died."""
        if isinstance(event, ServiceFailed):
            raise TransferError(event.reason)
        log.debug("transfer thread: %s", event)

    def try_add_transfer_peer(self, message: PeerDescriptor) -> bool:
        """Make a peer's pool writable if its descriptor is authentic and for our transport."""
        secret = self.settings.cluster_secret.encode()
        try:
            if message.transport != self.transfers.transport_name:
                raise ProtocolError(
                    f"transport differs: ours is {self.transfers.transport_name}, "
                    f"the peer's is {message.transport}"
                )
            if message.layout is not None:
                raise ProtocolError("its pool is sharded over ranks, ours is not")
            verify_descriptor(
                secret, message.agent, message.descriptor, message.num_blocks, message.digest
            )
        except ProtocolError as error:
            log.warning("refused the pool of agent %s: %s", message.agent, error)
            self.count(Count.DESCRIPTORS_REFUSED)
            return False
        self._descriptors[message.agent] = message
        self.restore_transfer_peer(message.agent)
        return True

    def restore_transfer_peer(self, agent: str) -> None:
        """Add a verified peer to the transport, unless the transport has it."""
        if agent not in self._transfer_peers:
            message = self._descriptors[agent]
            self._transfer_peers.add(agent)
            self.transfers.add_peer(agent, message.descriptor, message.num_blocks)

    def wants_digests(self, agent: str) -> bool:
        """Whether a verified peer compares digests of the blocks that it gets."""
        message = self._descriptors.get(agent)
        return message is not None and message.wants_digests

    def note_dropped_transfer_peer(self, agent: str) -> None:
        """The transport dropped this peer after a failure; `restore_transfer_peer` may follow."""
        self._transfer_peers.discard(agent)

    def remove_transfer_peer(self, agent: str) -> None:
        """Remove a peer that is gone: outstanding writes to it fail; a new descriptor adds it
        again."""
        self._descriptors.pop(agent, None)
        self._transfer_peers.discard(agent)
        self.transfers.remove_peer(agent)

    def block_digests(self, blocks: Seq[int]) -> list[bytes]:
        """One digest per pool block."""
        return [block_digest(self._pool.tensor[block]) for block in blocks]
