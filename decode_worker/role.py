"""The decode role: generates tokens from prompts that are computed elsewhere, or here.

For a sequence with remote KV the worker asks the source, and reserves no block before the source
has all of them. Then it grants the source the blocks that are not cached here; the sequence joins
the batch when these blocks and its first token have arrived. Other prompts, and suffixes of cached
prefixes, are prefilled here in chunks between decodes. A request that is handed over goes on
elsewhere with its blocks (`decode_worker.departures`). Owns the tasks, and those blocks of ended
tasks that a peer may still write to.
"""

from __future__ import annotations

import logging

import msgspec

from decode_worker.departures import Departures
from decode_worker.outbox import Outbox
from decode_worker.prefill_reach import PrefillReach
from decode_worker.resumption import Resumption
from decode_worker.task import DecodeTask
from engine.step_result import StepResult
from kv_transfer.handoff.key import HandoffKey, key_of
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from kv_transfer.transfer_loop import NotificationArrived
from process.sockets.control import Peer
from protocol.flight import FlightKind
from protocol.messages import (
    Abort,
    ControlMessage,
    Generate,
    HandoffToken,
    HandOver,
    KvBegun,
    KvClosed,
    NewAttempt,
    Resume,
    Role,
)
from protocol.sampling import TokenLogprobs
from protocol.traces import StepSpan
from scheduling.batch import Batch, Produced
from scheduling.sequence import Sequence, SequenceState
from worker.counters import Count
from worker.fenced_blocks import FencedBlocks
from worker.host import WorkerHost
from worker.inbound import InboundHandoffs
from worker.loop import HandoffLoad
from worker.peers import SourcePeers
from worker.tasks import Tasks

log = logging.getLogger(__name__)

_SILENT = "the source has fallen silent"
_NO_ROOM = "its blocks do not fit beside those that a silent worker may still write to"


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
        self._inbound = InboundHandoffs(host, sink, peers, self)
        self._peers = peers
        self._reach = reach
        self._departures = Departures(host, source)
        self.outbound = self._departures.outbound
        self._resumption = resumption
        self._fenced = FencedBlocks()
        self._uncompiled: list[DecodeTask] = []  # could join, but their grammars still compile
        self._silent: list[str] = []  # incarnations of sources
        self._stuck: set[int] = set()  # blocks that a silent worker may still write to
        self._outbox = Outbox(host)

    @property
    def num_jobs(self) -> int:
        """Number of jobs to finish before the worker may end."""
        return len(self.tasks) + len(self._fenced) + self._departures.num_open

    @property
    def is_sending(self) -> bool:
        """Whether requests that leave still need their blocks."""
        return self._departures.num_open > 0

    def end(self) -> None:
        """The process ends: tell the routers of what is left."""
        self._departures.give_up("the worker stopped")
        for task in self.tasks:
            self.fail(task, "the worker stopped", retryable=True)
        self._engine.try_withdraw()  # no request needs the step under way

    # -- receive ----------------------------------------------------------------------------

    def admits(self, message: NewAttempt) -> bool:
        """Requests to generate tokens for."""
        return isinstance(message, Generate)

    def is_known(self, key: HandoffKey) -> bool:
        """Whether this attempt is here or was here before."""
        return self.tasks.is_known(key) or self._sink.is_known(key)

    def open(self, router: Peer, message: NewAttempt, sequence: Sequence) -> None:
        """Generate tokens; if another worker computes the prompt, ask it."""
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
        if task.prefill is not None:
            self._inbound.ask(task.key, task.prefill)

    def refuse(self, key: HandoffKey, reason: str) -> None:
        """Nothing was asked of a source yet."""

    def handle(self, peer: Peer, message: ControlMessage) -> bool:
        """Handle another message of a router; False if it is none of this role's."""
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
        """Others may take us for dead: end all tasks, and keep no stream."""
        for task in self.tasks:
            self.drop(task)
        self._resumption.clear()
        self._departures.abort_all()

    def lose(self, peer: Peer) -> None:
        """A router is gone: drop its work, but for the streams that may outlive it."""
        for task in self.tasks:
            if task.router == peer and not self._resumption.try_orphan(task):
                self.drop(task)
        self._departures.lose(peer)

    def look(self) -> None:
        """Drop overdue orphans, and look after the sources."""
        for task in self._resumption.overdue(self.tasks):
            self.drop(task)
        self._peers.meet(self._clock.now())
        for incarnation, message in self._peers.receive():
            self._handle_source(incarnation, message)
        for incarnation in self._peers.gone(self._clock.now()):
            self._inbound.lose(incarnation)
            self._give_up_on_peer(incarnation, "the source is gone")
        self._reach.look(self._clock.now())
        for incarnation in self._peers.reset():
            self._give_up_on_peer(incarnation, "the source lost its connection to us")
        self._silent = self._peers.silent(self._clock.now())
        for incarnation in self._silent:
            self._give_up_on_peer(incarnation, _SILENT, of_blocks=True)
        self._give_back()

    def land(self, event: NotificationArrived) -> None:
        """Blocks have landed in our pool."""
        self._inbound.follow(event)

    def sweep(self) -> None:
        """Act on timeouts, and on grammars that have compiled."""
        uncompiled, self._uncompiled = self._uncompiled, []
        for task in uncompiled:
            self._try_join(task)
        self._inbound.sweep()

    def _abort(self, router: Peer, message: Abort) -> None:
        """The router no longer wants the attempt."""
        task = self.tasks.asked_by(router, key_of(message))
        if task is not None:
            self._host.flight.note(FlightKind.ABORTED, task.asked)
            self.drop(task)
        elif not self._departures.try_abort(key_of(message)):
            self._counters.add(Count.STALE_MESSAGES)

    def _hand_over(self, router: Peer, message: HandOver) -> None:
        """End the task's part here, between two steps. If it is decoding, its blocks stay for the
        next attempt. If it waits, receives or prefills, others can get all its blocks elsewhere."""
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
        self._outbox.flush()  # its tokens go before the end of its part
        trace = task.trace(self._host.worker_id, self._clock.wall_us())
        self._host.send(task.router, task.handed_over(message, keeps_kv, trace))
        if keeps_kv:
            self._departures.begin(task, message.next_attempt)

    def _handle_source(self, incarnation: str, message: ControlMessage) -> None:
        match message:
            case HandoffToken():
                self._take_first_token(incarnation, message)
            case KvBegun():
                self._inbound.begin(message)
            case KvClosed():
                task = self.tasks.find(key_of(message))
                if message.code and task is not None and task.waits_for_token_of(incarnation):
                    self.fail(task, message.error, code=message.code)
                self._inbound.close(message)
                task = self.tasks.find(key_of(message))
                if task is not None and task.waits_for_token_of(incarnation):
                    reason = message.error or "the source closed without a first token"
                    self.fail(task, reason, retryable=True)
            case _:
                self._counters.add(Count.UNEXPECTED_MESSAGES)
                log.warning("source %s sent %s", incarnation, type(message).__name__)

    def _give_up_on_peer(self, incarnation: str, reason: str, of_blocks: bool = False) -> None:
        """Stop waiting for this prefill worker's first tokens and, with `of_blocks`, for its
        blocks, although it may still write them."""
        for task in self.tasks:
            if task.waits_for(incarnation) and (of_blocks or task.token is None):
                self.fail(task, reason, retryable=True)

    def _give_back(self) -> None:
        """Give back waiting requests that fit only if blocks return to which a silent worker may
        still write: nobody knows when that is."""
        self._stuck = self._fenced.blocks_of(self._sink.fenced_by(self._silent))
        if not self._stuck:
            return
        for task in self.tasks:
            is_waiting = task.sequence.state is SequenceState.WAITING
            if is_waiting and not self._scheduler.fits_beside(task.sequence, self._stuck):
                self.fail(task, _NO_ROOM, retryable=True, lacks_room=True)

    def _take_first_token(self, incarnation: str, message: HandoffToken) -> None:
        task = self.tasks.find(key_of(message))
        if task is None or not task.waits_for_token_of(incarnation):
            self._counters.add(Count.STALE_MESSAGES)
            return
        vocab_size = self._engine.limits.vocab_size
        if message.index != task.sequence.num_output or not 0 <= message.token_id < vocab_size:
            self.fail(task, "the source sent an impossible token", retryable=True)
            return
        task.token = message
        task.first_token_us = self._clock.wall_us()
        self._host.flight.note(FlightKind.FIRST_TOKEN, task.asked)
        sequence = task.sequence
        is_waiting = sequence.state is SequenceState.WAITING
        if message.finish is not None and is_waiting and sequence.is_ready:
            self._finish_without_blocks(task, message)
        else:
            self._try_join(task)

    def _finish_without_blocks(self, task: DecodeTask, token: HandoffToken) -> None:
        """The first token completes the output, and nothing was granted for it: its blocks are not
        needed here, where they might have to wait for room."""
        self._inbound.abort(task.key)
        produced = self._scheduler.completed(task.sequence, token.token_id, self._clock.now())
        if produced.finish is None:
            reason = "the source ended an output that goes on"
            self.fail(task, reason, retryable=True)
        else:
            self._emit(task, produced, token.logprobs)

    # -- schedule ---------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """Before a batch runs: grant blocks for what is admitted."""
        for sequence in batch.received:
            task = self.tasks.of(sequence)
            self._mark_admitted(task)
            self._grant(task)
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

    def _grant(self, task: DecodeTask) -> None:
        """Offer the prefill worker the missing blocks; there may be none. A silent worker gets no
        blocks, because they would stay fenced for as long as it is silent."""
        assert task.prefill is not None
        if task.prefill.incarnation in self._silent:
            self.fail(task, _SILENT, retryable=True)
            return
        first_block = task.sequence.num_cached // self._engine.layout.block_size
        blocks = task.sequence.block_table[first_block:]
        task.granted_blocks = len(blocks)
        self._inbound.offer(task.key, first_block, blocks)

    def _try_join(self, task: DecodeTask) -> None:
        """Join the batch if blocks and first token have arrived and the grammar is compiled."""
        is_over = task.sequence.state is not SequenceState.RECEIVING
        if task.token is None or not task.blocks_arrived_us or is_over:
            return
        if not task.sequence.is_ready:
            self._uncompiled.append(task)
            return
        produced = self._scheduler.arrived(task.sequence, task.token.token_id, self._clock.now())
        self._counters.add(Count.HANDOFFS)
        self._emit(task, produced, task.token.logprobs)

    # -- deliver ----------------------------------------------------------------------------

    def deliver(self, result: StepResult) -> None:
        """Note the steps of decodes, and send what was produced."""
        started, ended = self._clock.wall_us(result.started), self._clock.wall_us(result.ended)
        num_decodes = len(result.batch.decodes)
        span = StepSpan(started, ended, num_decodes, 1, result.batch.num_chunk_tokens)
        for sequence in result.batch.decodes:
            self.tasks.of(sequence).note_step(span)
        for produced, logprobs in zip(result.produced, result.logprobs, strict=True):
            task = self.tasks.of(produced.sequence)
            task.first_token_us = task.first_token_us or self._clock.wall_us(result.ended)
            self._emit(task, produced, logprobs)

    def _emit(self, task: DecodeTask, produced: Produced, logprobs: TokenLogprobs | None) -> None:
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
        """The handoffs right now."""
        self._inbound.count()
        self._counters.add_up_to(Count.FRAMES_REFUSED, "peers", self._peers.refused)
        return HandoffLoad(
            self._sink.num_open + self._departures.num_open,
            self._sink.ignored + self._source.ignored,
            len(self._stuck),
            self._fenced.num_blocks,
        )

    def holders(self) -> list[str]:
        """What holds blocks, for people."""
        held = [
            f"{len(task.sequence.block_table)} blocks: {task.key}, {task.sequence.state}"
            + (f", from {task.prefill.worker_id}" if task.prefill else "")
            for task in self.tasks
            if task.sequence.block_table
        ]
        return held + self._fenced.describe()

    def fail(
        self,
        task: DecodeTask,
        reason: str,
        retryable: bool = True,
        code: str = "",
        lacks_room: bool = False,
    ) -> None:
        """End the attempt without its last token and tell the router why."""
        self.drop(task)
        self._outbox.flush()  # its tokens go before its end
        if task.orphaned_at is None:
            trace_id = task.sequence.trace_id
            failure = self._host.failure(task.asked, reason, retryable, lacks_room, code, trace_id)
            computed = task.computed_tokens
            failure = msgspec.structs.replace(failure, computed_tokens=computed)
            self._host.send(task.router, failure)

    def drop(self, task: DecodeTask) -> None:
        """Leave the scheduler; blocks that a peer may still write to stay until `on_unfenced`.

        Blocks that arrived stay cached, so that the next attempt need not fetch them again.
        """
        self.tasks.remove(task)
        sequence = task.sequence
        self._scheduler.publish_arrived(sequence, self._sink.arrived(task.key))
        if task.blocks_arrived_us and sequence.state is SequenceState.RECEIVING:
            self._scheduler.publish_arrived(sequence, range(len(sequence.block_table)))
        granted = bool(task.granted_blocks) and self._sink.is_open(task.key)
        if sequence.state is not SequenceState.FINISHED:
            self._scheduler.finish(sequence, release=not granted)
        elif not granted:
            self._scheduler.release_blocks(sequence)
        if granted:
            self._fenced.keep(task.key, sequence)
        if granted or self._sink.is_asking(task.key):
            self._inbound.abort(task.key)

    # -- callbacks of handoffs: see `GrantOwner` ----------------------------------------------

    def on_begun(self, key: HandoffKey) -> None:
        """The source holds the whole prompt: the sequence may be admitted."""
        task = self.tasks.find(key)
        if task is not None:
            task.sequence.source_has_begun = True

    def on_complete(self, key: HandoffKey) -> None:
        """Every block has arrived."""
        task = self.tasks.find(key)
        if task is not None:
            task.blocks_arrived_us = self._clock.wall_us()
            self._host.flight.note(FlightKind.ARRIVED, task.asked, task.granted_blocks)
            self._try_join(task)

    def on_failed(self, key: HandoffKey, reason: str, arrived: tuple[int, ...]) -> None:
        """The attempt failed; the blocks that arrived stay cached."""
        task = self.tasks.find(key)
        if task is not None:
            self._scheduler.publish_arrived(task.sequence, arrived)
            self.fail(task, reason, retryable=True)

    def on_unfenced(self, key: HandoffKey) -> None:
        """Release the blocks of an ended task."""
        sequence = self._fenced.take(key)
        if sequence is not None:
            self._scheduler.release_blocks(sequence)
