"""Requests whose prompt another worker computes, from the ask to the running batch.

The worker asks the source of such a request, and reserves no block before the source holds all
blocks of the prompt. Then it grants the source the blocks that are not cached here. When these
blocks and the first token have arrived, the sequence joins the batch. The counterpart of
`decode_worker.departures`.
"""

from __future__ import annotations

import logging
from typing import Protocol

from decode_worker.prefill_reach import PrefillReach
from decode_worker.task import DecodeTask
from kv_transfer.handoff.key import HandoffKey, key_of
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.transfer_loop import OfPeers
from protocol.control_message import ControlMessage
from protocol.flight import FlightKind
from protocol.handoff_messages import HandoffToken, KvBegun, KvClosed
from protocol.sampling import TokenLogprobs
from scheduling.batch import Produced
from scheduling.sequence import SequenceState
from worker.counters import Count
from worker.host import WorkerHost
from worker.inbound.handoffs import NO_ROOM, InboundHandoffs
from worker.inbound.source_links import SourcePeers
from worker.moved_blocks import moved_blocks
from worker.tasks import Tasks

log = logging.getLogger(__name__)

_SILENT = "the source has fallen silent"


class TaskOwner(Protocol):
    """The owner of the tasks, which ends them."""

    tasks: Tasks[DecodeTask]

    def emit(self, task: DecodeTask, produced: Produced, logprobs: TokenLogprobs | None) -> None:
        """Pass on a token of the task."""

    def fail(
        self,
        task: DecodeTask,
        reason: str,
        retryable: bool = True,
        code: str = "",
        lacks_room: bool = False,
    ) -> None:
        """Fail the attempt."""


class Arrivals:
    """The handoffs that a decode worker receives, and their sources."""

    def __init__(
        self,
        host: WorkerHost,
        sink: HandoffSink,
        peers: SourcePeers,
        reach: PrefillReach,
        owner: TaskOwner,
    ) -> None:
        self._host = host
        self._clock = host.clock
        self._counters = host.counters
        self._scheduler = host.engine.scheduler
        self._layout = host.engine.layout
        self._sink = sink
        self.inbound = InboundHandoffs(host, sink, peers, self)
        self._peers = peers
        self._reach = reach
        self._owner = owner
        self._uncompiled: list[DecodeTask] = []  # ready, but their grammars compile

    # -- calls by the owner -----------------------------------------------------------------

    def expect(self, task: DecodeTask) -> None:
        """Ask the worker that computes the new task's prompt, if there is one."""
        if task.prefill is not None:
            prompt = task.sequence.digest(task.sequence.num_tokens)
            self.inbound.ask(task.key, task.prefill, prompt)

    def grant(self, task: DecodeTask) -> None:
        """Grant the source the missing blocks; there may be none. A silent worker gets no blocks,
        because they would stay fenced for as long as it is silent."""
        assert task.prefill is not None
        if task.prefill.incarnation in self.inbound.silent:
            self._owner.fail(task, _SILENT, retryable=True)
            return
        sequence = task.sequence
        first_block = sequence.num_cached // self._layout.block_size
        blocks = [
            moved_blocks(sequence, group, sequence.num_tokens, first_block)
            for group in range(len(self._layout.groups))
        ]
        task.granted_blocks = sum(len(each.block_ids) for each in blocks)
        self.inbound.offer(task.key, blocks)

    def release(self, task: DecodeTask) -> None:
        """Remove an ended task from the scheduler. Blocks that a peer may still write to stay
        fenced."""
        sequence = task.sequence
        self._scheduler.publish_arrived(sequence, self._sink.arrived(task.key))
        if task.blocks_arrived_us and sequence.state is SequenceState.RECEIVING:
            num_blocks = sequence.blocks_for(sequence.num_tokens)
            for group, table in enumerate(sequence.tables):
                self._scheduler.publish_arrived(sequence, range(table.first, num_blocks), group)
        granted = bool(task.granted_blocks) and self._sink.is_open(task.key)
        if sequence.state is not SequenceState.FINISHED:
            self._scheduler.finish(sequence, release=not granted)
        elif not granted:
            self._scheduler.release_blocks(sequence)
        if granted:
            self.inbound.fenced.keep(task.key, [each.blocks for each in sequence.tables])
            for table in sequence.tables:
                table.blocks = []
        if granted or self._sink.is_asking(task.key):
            self.inbound.abort(task.key)

    # -- events -----------------------------------------------------------------------------

    def poll_sources(self) -> None:
        """Connect to new sources, drop lost ones, and read what they have sent."""
        self._peers.connect_new(self._clock.now())
        for incarnation, message in self.inbound.receive():
            self._try_handle_source(incarnation, message)
        for incarnation in self.inbound.take_lost():
            self._give_up_on_peer(incarnation, "the source is gone")
        self._reach.update(self._clock.now())
        for incarnation in self._peers.reset():
            self._give_up_on_peer(incarnation, "the source lost its connection to us")
        self.inbound.update_silent()
        for incarnation in self.inbound.silent:
            self._give_up_on_peer(incarnation, _SILENT, of_blocks=True)
        self._give_back()

    def land(self, event: OfPeers) -> None:
        """Note blocks that have landed in our pool."""
        self.inbound.follow(event)

    def sweep(self) -> None:
        """Act on timeouts, and on grammars that have compiled."""
        uncompiled, self._uncompiled = self._uncompiled, []
        for task in uncompiled:
            self._try_join(task)
        self.inbound.sweep()

    def count(self) -> None:
        """Bring the worker's counters up to date."""
        self.inbound.count()

    # -- steps ------------------------------------------------------------------------------

    def _try_handle_source(self, incarnation: str, message: ControlMessage) -> None:
        """Handle a source's message. One that cannot be handled ends the requests that wait for
        the source, and nothing else."""
        try:
            self._handle_source(incarnation, message)
        except Exception:
            log.exception("cannot handle a %s of %s", type(message).__name__, incarnation)
            reason = "the source sent a message that cannot be handled"
            self._give_up_on_peer(incarnation, reason, of_blocks=True)

    def _handle_source(self, incarnation: str, message: ControlMessage) -> None:
        match message:
            case HandoffToken():
                self._take_first_token(incarnation, message)
            case KvBegun():
                self.inbound.begin(incarnation, message)
            case KvClosed():
                task = self._owner.tasks.find(key_of(message))
                if message.code and task is not None and task.waits_for_token_of(incarnation):
                    self._owner.fail(task, message.error, code=message.code)
                self.inbound.close(incarnation, message)
                task = self._owner.tasks.find(key_of(message))
                if task is not None and task.waits_for_token_of(incarnation):
                    reason = message.error or "the source closed without a first token"
                    self._owner.fail(task, reason, retryable=True)
            case _:
                self._host.note_unexpected(incarnation, message)

    def _give_up_on_peer(self, incarnation: str, reason: str, of_blocks: bool = False) -> None:
        """Stop waiting for this source's first tokens and, with `of_blocks`, for its blocks,
        although it may still write them."""
        for task in self._owner.tasks:
            if task.waits_for(incarnation) and (of_blocks or task.token is None):
                self._owner.fail(task, reason, retryable=True)

    def _give_back(self) -> None:
        """Fail waiting requests that fit only beside stuck blocks."""
        self.inbound.update_silent()
        for task in self._owner.tasks if self.inbound.num_stuck else ():
            if self.inbound.is_stranded(task.sequence):
                self._owner.fail(task, NO_ROOM, retryable=True, lacks_room=True)

    def _take_first_token(self, incarnation: str, message: HandoffToken) -> None:
        task = self._owner.tasks.find(key_of(message))
        if task is None or not task.waits_for_token_of(incarnation):
            self._counters.add(Count.STALE_MESSAGES)
            return
        vocab_size = self._host.engine.limits.vocab_size
        if message.index != task.sequence.num_output or not 0 <= message.token_id < vocab_size:
            self._owner.fail(task, "the source sent an impossible token", retryable=True)
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
        """End a task whose first token completes the output before anything was granted. The task
        needs no blocks here, so it need not wait for them."""
        self.inbound.abort(task.key)
        produced = self._scheduler.completed(task.sequence, token.token_id, self._clock.now())
        if produced.finish is None:
            reason = "the source ended an output that goes on"
            self._owner.fail(task, reason, retryable=True)
        else:
            self._owner.emit(task, produced, token.logprobs)

    def _try_join(self, task: DecodeTask) -> None:
        """Join the batch if the blocks and the first token have arrived and the grammar is
        compiled."""
        is_over = task.sequence.state is not SequenceState.RECEIVING
        if task.token is None or not task.blocks_arrived_us or is_over:
            return
        if not task.sequence.is_ready:
            self._uncompiled.append(task)
            return
        produced = self._scheduler.arrived(task.sequence, task.token.token_id, self._clock.now())
        self._counters.add(Count.HANDOFFS)
        self._owner.emit(task, produced, task.token.logprobs)

    # -- callbacks of handoffs: see `GrantOwner` ----------------------------------------------

    def on_begun(self, key: HandoffKey) -> None:
        """The source holds the whole prompt: the sequence may be admitted."""
        task = self._owner.tasks.find(key)
        if task is not None:
            task.sequence.source_has_begun = True

    def on_complete(self, key: HandoffKey) -> None:
        """Every block has arrived."""
        task = self._owner.tasks.find(key)
        if task is not None:
            task.blocks_arrived_us = self._clock.wall_us()
            self._host.flight.note(FlightKind.ARRIVED, task.asked, task.granted_blocks)
            self._try_join(task)

    def on_failed(self, key: HandoffKey, reason: str, arrived: tuple[int, ...]) -> None:
        """The attempt failed; the blocks that arrived stay cached."""
        task = self._owner.tasks.find(key)
        if task is not None:
            self._scheduler.publish_arrived(task.sequence, arrived)
            self._owner.fail(task, reason, retryable=True)
