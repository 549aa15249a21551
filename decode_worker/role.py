"""The decode role: generates tokens from prompts that are computed elsewhere, or here.

A prompt that another worker computes arrives with its blocks and its first token
(`decode_worker.arrivals`). Other prompts, and suffixes of cached prefixes, are prefilled here in
chunks between decodes. A request that is handed over leaves with its blocks
(`decode_worker.departures`). Owns the tasks.
"""

from __future__ import annotations

import msgspec

from decode_worker.arrivals import Arrivals
from decode_worker.departures import Departures
from decode_worker.outbox import Outbox
from decode_worker.prefill_reach import PrefillReach
from decode_worker.resumption import Resumption
from decode_worker.task import DecodeTask
from engine.step_result import StepResult
from kv_transfer.handoff.key import HandoffKey, key_of
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from kv_transfer.transfer_loop import OfPeers
from process.sockets.control import Peer
from protocol.control_message import ControlMessage
from protocol.flight import FlightKind
from protocol.messages import Abort, Generate, HandOver, NewAttempt, Resume, Role
from protocol.sampling import TokenLogprobs
from protocol.traces import StepSpan
from scheduling.batch import Batch, Produced
from scheduling.sequence import Sequence, SequenceState
from worker.counters import Count
from worker.host import WorkerHost
from worker.inbound.fetches import Fetches
from worker.inbound.moving_caches import MovingCaches
from worker.inbound.source_links import SourcePeers
from worker.reporter import HandoffLoad
from worker.tasks import Tasks


class DecodeRole:
    """The requests of one worker; see `WorkerRole`. Belongs to the loop's thread."""

    waits_for_others = False

    def __init__(
        self,
        host: WorkerHost,
        sink: HandoffSink,
        source: HandoffSource,
        peers: SourcePeers,
        reach: PrefillReach,
        resumption: Resumption,
    ) -> None:
        self.tasks: Tasks[DecodeTask] = Tasks()
        self._host = host
        self._clock = host.clock
        self._counters = host.counters
        self._engine = host.engine
        self._scheduler = host.engine.scheduler
        self._sink = sink
        self._source = source
        self._arrivals = Arrivals(host, sink, peers, reach, self)
        self._inbound = self._arrivals.inbound
        self._fetches = Fetches(host, self._inbound, peers)
        self.caches = MovingCaches(host, self._inbound, peers)
        self._departures = Departures(host, source)
        self.outbound = self._departures.outbound
        self._resumption = resumption
        self._outbox = Outbox(host)

    @property
    def num_jobs(self) -> int:
        """Number of jobs to finish before the worker may end."""
        served = self._departures.num_open + len(self.outbound.served)
        return len(self.tasks) + len(self._inbound.fenced) + served + self.caches.is_leaving

    @property
    def is_sending(self) -> bool:
        """Whether the blocks of leaving requests, or of fetches that peers began, are still
        needed."""
        return self._departures.num_open + len(self.outbound.served) > 0

    def end(self) -> None:
        """Tell the routers of unfinished work, because the process ends."""
        self._departures.give_up("the worker stopped")
        for task in self.tasks:
            self.fail(task, "the worker stopped", retryable=True)
        self._engine.try_withdraw()  # no request needs the step under way

    # -- receive ----------------------------------------------------------------------------

    def admits(self, message: NewAttempt) -> bool:
        """Whether it is a request to generate tokens."""
        return isinstance(message, Generate)

    def is_known(self, key: HandoffKey) -> bool:
        """Whether this attempt is here or was here before."""
        return self.tasks.is_known(key) or self._sink.is_known(key)

    def open(self, router: Peer, message: NewAttempt, sequence: Sequence) -> None:
        """Generate tokens. If another worker computes the prompt, ask that worker."""
        assert isinstance(message, Generate)
        task = DecodeTask(
            router,
            sequence,
            self._clock.wall_us(),
            message.is_resumable,
            prefill=message.prefill,
            cached_tokens=message.cached_tokens,
        )
        self.tasks.add(task)
        self._fetches.hint(sequence, [] if message.prefill else message.holders)
        self._arrivals.expect(task)

    def refuse(self, key: HandoffKey, reason: str) -> None:
        """Do nothing: no source has been asked yet."""

    def handle(self, peer: Peer, message: ControlMessage) -> bool:
        """Handle another message of a router; False if it is not for this role."""
        if peer.role is not Role.ROUTER:
            return False
        match message:
            case Abort():
                self._abort(peer, message)
            case Resume():
                tasks = self.tasks.of_request(message.request_id)
                self._resumption.answer(peer, message, tasks[0] if tasks else None)
            case HandOver():
                self._hand_over(peer, message)
            case _:
                return False
        return True

    def drop_all(self) -> None:
        """End all tasks and keep no stream, because the rest of the fleet may already have taken
        this worker for dead."""
        for task in self.tasks:
            self.drop(task)
        self._resumption.clear()
        self._departures.abort_all()
        self.outbound.abort_served("the source stood still")

    def lose(self, peer: Peer) -> None:
        """Drop the work of a lost router, except streams that may outlive it."""
        for task in self.tasks:
            if task.router == peer and not self._resumption.try_orphan(task):
                self.drop(task)
        self._departures.lose(peer)

    def poll_peers(self) -> None:
        """Drop overdue orphans, and read from the sources."""
        for task in self._resumption.overdue(self.tasks):
            self.drop(task)
        self._arrivals.poll_sources()

    def land(self, event: OfPeers) -> None:
        """Note blocks that have landed in our pool."""
        self._arrivals.land(event)

    def sweep(self) -> None:
        """Act on timeouts, and on grammars that have compiled."""
        self._arrivals.sweep()

    def _abort(self, router: Peer, message: Abort) -> None:
        """End an attempt that the router no longer wants."""
        task = self.tasks.asked_by(router, key_of(message))
        if task is not None:
            self._host.flight.note(FlightKind.ABORTED, task.asked)
            self.drop(task)
        elif not self._departures.try_abort(key_of(message)):
            self._counters.add(Count.STALE_MESSAGES)

    def _hand_over(self, router: Peer, message: HandOver) -> None:
        """End the task's part here, between two steps. If it is decoding, its blocks stay for the
        next attempt. If it waits, receives or prefills, all its blocks exist elsewhere."""
        task = self.tasks.asked_by(router, key_of(message))
        if task is None:
            self._counters.add(Count.STALE_MESSAGES)
            return
        self._host.flight.note(FlightKind.HANDED_OVER, task.asked)
        sequence = task.sequence
        keeps_kv = sequence.state is SequenceState.RUNNING
        if keeps_kv:
            self.tasks.remove(task)
            self._scheduler.finish(sequence, release=False)
        else:
            self.drop(task)
        self._outbox.flush()  # the task's tokens are sent before the end of its part
        trace = task.trace(self._host.worker_id, self._clock.wall_us())
        self._host.send(task.router, task.handed_over(message, keeps_kv, trace))
        if keeps_kv:
            self._departures.begin(task, message.next_attempt)

    # -- schedule ---------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """Grant blocks to the sources of admitted sequences, and start fetches, before a batch
        runs."""
        for sequence in batch.fetching:
            self._mark_admitted(self.tasks.of(sequence))
            self._fetches.begin(sequence)
        for sequence in batch.received:
            task = self.tasks.of(sequence)
            self._mark_admitted(task)
            self._arrivals.grant(task)
        for chunk in batch.chunks:
            self._mark_admitted(self.tasks.of(chunk.sequence))
        for sequence in batch.decodes:
            task = self.tasks.of(sequence)
            task.first_step_us = task.first_step_us or self._clock.wall_us()

    def _mark_admitted(self, task: DecodeTask) -> None:
        if not task.admitted_us:
            task.admitted_us = self._clock.wall_us()
            blocks, held = len(task.sequence.block_table), task.sequence.num_cached
            task.held_tokens = held
            self._counters.add(Count.CACHED_TOKENS, held)
            self._host.flight.note(FlightKind.ADMITTED, task.asked, blocks, held)

    # -- deliver ----------------------------------------------------------------------------

    def deliver(self, result: StepResult) -> None:
        """Note the steps of decodes, and send the produced tokens."""
        started, ended = self._clock.wall_us(result.started), self._clock.wall_us(result.ended)
        num_decodes = len(result.batch.decodes)
        span = StepSpan(started, ended, num_decodes, 1, result.batch.num_chunk_tokens)
        for sequence in result.batch.decodes:
            self.tasks.of(sequence).note_step(span)
        for produced, logprobs in zip(result.produced, result.logprobs, strict=True):
            task = self.tasks.of(produced.sequence)
            task.first_token_us = task.first_token_us or self._clock.wall_us(result.ended)
            self.emit(task, produced, logprobs)

    def emit(self, task: DecodeTask, produced: Produced, logprobs: TokenLogprobs | None) -> None:
        """Queue a token for the task's router; the last token ends the task."""
        trace = None
        if produced.finish is not None:
            trace = task.trace(self._host.worker_id, self._clock.wall_us())
            num_output = produced.index + 1
            self._host.flight.note(FlightKind.FINISHED, task.asked, tokens=num_output)
            self.tasks.remove(task)
        self._counters.add(Count.DECODE_TOKENS)
        tokens = task.tokens(produced, logprobs, trace)
        if task.orphaned_at is None:
            self._outbox.put(task.router, tokens)
        if trace is not None:
            self._resumption.keep(task, trace)

    def flush(self) -> None:
        """Send the step's tokens."""
        self._outbox.flush()

    def load(self) -> HandoffLoad:
        """The current handoffs."""
        self._arrivals.count()
        return HandoffLoad(
            self._sink.num_open + self._departures.num_open,
            self._sink.ignored + self._source.ignored,
            self._inbound.num_stuck,
            self._inbound.fenced.num_blocks,
            self.outbound.served.num_blocks,
        )

    def holders(self) -> list[str]:
        """The holders of blocks, for people."""
        held = [
            f"{len(task.sequence.block_table)} blocks: {task.key}, {task.sequence.state}"
            + (f", from {task.prefill.worker_id}" if task.prefill else "")
            for task in self.tasks
            if task.sequence.block_table
        ]
        return held + self._inbound.fenced.describe()

    def fail(
        self,
        task: DecodeTask,
        reason: str,
        retryable: bool = True,
        code: str = "",
        lacks_room: bool = False,
    ) -> None:
        """End the attempt without its last token and tell the router the reason."""
        self.drop(task)
        self._outbox.flush()  # the task's tokens are sent before its end
        if task.orphaned_at is None:
            trace_id = task.sequence.trace_id
            failure = self._host.failure(task.asked, reason, retryable, lacks_room, code, trace_id)
            computed = task.computed_tokens
            failure = msgspec.structs.replace(failure, computed_tokens=computed)
            self._host.send(task.router, failure)

    def drop(self, task: DecodeTask) -> None:
        """Remove a task that nobody wants from the scheduler. Blocks that arrived stay cached, so
        that the next attempt need not fetch them again."""
        self.tasks.remove(task)
        self._fetches.drop(task.sequence)
        self._arrivals.release(task)
