"""The prefill role: computes prompts in chunks, and streams the blocks that each chunk completed.

When this worker holds blocks for a whole prompt, it answers the sink's ask, and the sink grants. A
prompt may first fetch leading blocks from workers that hold them; its sink hears nothing until that
is over. Computing never waits for the grant: blocks that are ready earlier are sent when it
arrives. The blocks of a chunk are sent while the next chunk computes, because the transfer service
has its own thread. With one step ahead, a chunk that gives no token is offered at its launch: the
transfer thread waits until its blocks are computed, while the loop launches the next chunk. Owns
the tasks, and their sequences' blocks until the handoff releases them.
"""

from __future__ import annotations

import msgspec

from engine.fences import Fence
from engine.step_result import StepResult, Stored
from kv_transfer.handoff.key import HandoffKey, key_of
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from kv_transfer.transfer_loop import OfPeers
from prefill_worker.task import PrefillTask
from process.sockets.control import Peer
from protocol.control_message import ControlMessage
from protocol.flight import FlightKind
from protocol.messages import Abort, NewAttempt, Prefill, PrefillDone, Role
from protocol.traces import PrefillTrace, WriteSpan
from scheduling.batch import Batch
from scheduling.sequence import Sequence, SequenceState
from worker.counters import Count
from worker.host import WorkerHost
from worker.inbound.fetches import Fetches
from worker.inbound.handoffs import NO_ROOM, InboundHandoffs
from worker.inbound.moving_caches import MovingCaches
from worker.inbound.source_links import SourcePeers
from worker.moved_blocks import moved_blocks
from worker.outbound import OutboundHandoffs
from worker.reporter import HandoffLoad
from worker.tasks import Tasks


class PrefillRole:
    """The prompts of one worker; see `WorkerRole`. Belongs to the loop's thread."""

    def __init__(
        self, host: WorkerHost, source: HandoffSource, sink: HandoffSink, peers: SourcePeers
    ) -> None:
        self.tasks: Tasks[PrefillTask] = Tasks()
        self.outbound = OutboundHandoffs(host, source, self)
        self._host = host
        self._clock = host.clock
        self._counters = host.counters
        self._engine = host.engine
        self._scheduler = host.engine.scheduler
        self._source = source
        self._sink = sink
        self._peers = peers
        self._inbound = InboundHandoffs(host, sink, peers, owner=None)
        self._fetches = Fetches(host, self._inbound, peers)
        self.caches = MovingCaches(host, self._inbound, peers)

    @property
    def num_jobs(self) -> int:
        """Number of prompts whose blocks are still needed here, and of transfers of others."""
        served = len(self.outbound.served)
        return len(self.tasks) + len(self._inbound.fenced) + served + self.caches.is_leaving

    @property
    def is_sending(self) -> bool:
        """Whether handoffs that this worker sends are open."""
        return self._source.num_open > 0

    @property
    def waits_for_others(self) -> bool:
        """Whether a prompt that has begun waits for a live sink's grant."""
        return self._source.waits_for_grant

    def end(self) -> None:
        """Tell the routers of unfinished work, because the process ends."""
        for task in self.tasks:
            if not task.unwanted:
                reason, trace_id = "the worker stopped", task.sequence.trace_id
                failed = self._host.failure(task.key, reason, retryable=True, trace_id=trace_id)
                self._host.send(task.router, failed)

    # -- receive ----------------------------------------------------------------------------

    def admits(self, message: NewAttempt) -> bool:
        """Whether it is a prompt to compute."""
        return isinstance(message, Prefill)

    def is_known(self, key: HandoffKey) -> bool:
        """Whether this attempt is here or was here before."""
        return self.tasks.is_known(key)

    def open(self, router: Peer, message: NewAttempt, sequence: Sequence) -> None:
        """Compute a prompt, and expect a sink to ask for it."""
        task = PrefillTask(router, sequence, self._clock.wall_us(), message.is_resumable)
        self.tasks.add(task)
        self._fetches.hint(sequence, message.holders)
        num_blocks = sequence.blocks_for(sequence.num_tokens)
        prompt = sequence.digest(sequence.num_tokens)
        self.outbound.open(task.key, num_blocks, sequence.deadline, prompt)

    def refuse(self, key: HandoffKey, reason: str) -> None:
        """Tell the sink, too, that the prompt is not computed here."""
        self.outbound.abort(key, reason)

    def handle(self, peer: Peer, message: ControlMessage) -> bool:
        """End an attempt of the router that it no longer wants; False for other messages."""
        if not isinstance(message, Abort) or peer.role is not Role.ROUTER:
            return False
        task = self.tasks.find(key_of(message))
        if task is None or task.router != peer:
            self._counters.add(Count.STALE_MESSAGES)
        else:
            self.drop(task)
        return True

    def drop(self, task: PrefillTask) -> None:
        """Stop computing and writing for an attempt that neither its router nor its sink wants."""
        task.unwanted = True
        self._host.flight.note(FlightKind.ABORTED, task.key)
        self._stop_computing(task)
        self.outbound.abort(task.key, "aborted")

    def drop_all(self) -> None:
        """End all prompts, also those that so far a sink has only asked for, because the rest of
        the fleet may already have taken this worker for dead."""
        for task in self.tasks:
            self.drop(task)
        self.outbound.abort_all("the source stood still")

    def lose(self, peer: Peer) -> None:
        """End the prompts of a lost router. A resumable prompt that a sink waits for continues, and
        the sink decides for how long."""
        for task in self.tasks:
            is_waited_for = task.is_resumable and self.outbound.is_asked_for(task.key)
            if task.router == peer and not is_waited_for:
                self.drop(task)

    def poll_peers(self) -> None:
        """Read from the workers whose blocks we fetch. Fail prompts that fit only beside blocks
        that a silent one may still write to."""
        for incarnation, message in self._inbound.receive():
            self._host.note_unexpected(incarnation, message)
        self._inbound.take_lost()
        self._peers.reset()  # a sink repeats its asks after a lost connection
        self._inbound.update_silent()
        for task in self.tasks if self._inbound.num_stuck else ():
            if self._inbound.is_stranded(task.sequence):
                task.lacks_room = True
                self.fail(task, NO_ROOM, retryable=True)

    def land(self, event: OfPeers) -> None:
        """Note blocks that have landed in our pool."""
        self._inbound.follow(event)

    def sweep(self) -> None:
        """Act on timeouts, and share the pool among the connected sinks."""
        self._inbound.sweep()
        self._scheduler.shares.num_targets = self.outbound.num_sinks

    # -- schedule ---------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """Start fetches; tell sinks which prompts have begun, and send the blocks that are already
        here, before a batch runs."""
        for sequence in batch.fetching:
            self._fetches.begin(sequence)
        for chunk in batch.chunks:
            task = self.tasks.find_of(chunk.sequence)
            if task is not None and not task.scheduled_us:
                task.scheduled_us = self._clock.wall_us()
                self._counters.add(Count.CACHED_TOKENS, chunk.sequence.num_cached)
                self._host.flight.note(FlightKind.SCHEDULED, task.key, tokens=chunk.start)
                self.outbound.begin(task.key)
                num_cached = chunk.start // self._engine.layout.block_size
                self._offer(task, num_cached, chunk=-1, fence=self._engine.computed)

    # -- deliver ----------------------------------------------------------------------------

    def deliver(self, result: StepResult) -> None:
        """Send the blocks that the step completed and the tokens of completed prompts."""
        for stored in result.stored:
            self._offer_chunk(stored)
        for produced, logprobs in zip(result.produced, result.logprobs, strict=True):
            task = self.tasks.find_of(produced.sequence)
            if task is not None:
                task.token = task.handoff_token(produced, logprobs)
                self._host.flight.note(FlightKind.FIRST_TOKEN, task.key)
                self._host.send(task.router, task.first_token(task.token, self._trace(task)))
                self.outbound.finish(task.key, task.token)

    def fail(self, task: PrefillTask, reason: str, retryable: bool, code: str = "") -> None:
        """End an attempt whose step failed or whose time is over."""
        task.error = reason
        task.is_hopeless, task.code = not retryable, code
        self._stop_computing(task)
        self.outbound.abort(task.key, reason)

    def flush(self) -> None:
        """Do nothing: tokens are sent as they come."""

    def load(self) -> HandoffLoad:
        """The current handoffs."""
        self._inbound.count()
        return HandoffLoad(
            self._source.num_open + self._sink.num_open,
            self._source.ignored + self._sink.ignored,
            self._inbound.num_stuck,
            self._inbound.fenced.num_blocks,
            self.outbound.served.num_blocks,
        )

    def _offer_chunk(self, stored: Stored) -> None:
        """Offer the blocks that a chunk has filled; the last one of a prompt need not be full."""
        chunk = stored.chunk
        task = self.tasks.find_of(chunk.sequence)
        if task is not None:
            num_tokens = chunk.start + chunk.num_tokens
            whole = num_tokens // self._engine.layout.block_size
            num_ready = chunk.sequence.blocks_for(num_tokens) if chunk.completes else whole
            self._offer(task, num_ready, task.num_stored, stored.fence, chunk.completes)
            task.num_stored += 1

    def _offer(
        self, task: PrefillTask, num_ready: int, chunk: int, fence: Fence, is_last: bool = False
    ) -> None:
        """Offer the blocks that are ready once `fence` is passed. Blocks of groups with a window
        are offered at the end, because the window moves until then."""
        first, task.num_ready = task.num_ready, num_ready
        if num_ready == first:
            return
        num_tokens = num_ready * self._engine.layout.block_size
        for group, kept in enumerate(self._engine.layout.groups):
            if kept.window is None:
                blocks = moved_blocks(task.sequence, group, num_tokens, first)
                self.outbound.offer(task.key, blocks, chunk, fence)
            elif is_last:
                blocks = moved_blocks(task.sequence, group, num_tokens)
                self.outbound.offer(task.key, blocks, chunk, fence)

    # -- callbacks of handoffs: see `HandoffOwner` ---------------------------------------------

    def on_written(self, key: HandoffKey, span: WriteSpan, num_bytes: int) -> None:
        """Note blocks that have arrived at the sink."""
        task = self.tasks.find(key)
        if task is not None:
            task.writes.append(span)
            task.bytes_moved += num_bytes
            since = self._clock.now() - (span.done_us - span.post_us) / 1e6
            self._host.flight.note(FlightKind.WRITE, key, number=span.num_blocks, since=since)

    def on_granted(self, key: HandoffKey) -> None:
        """The sink has granted its blocks: the prompt no longer counts as waiting for it."""
        task = self.tasks.find(key)
        if task is not None:
            self._scheduler.shares.release(task.sequence)

    def on_unwanted(self, key: HandoffKey) -> None:
        """Stop computing, because the sink gave up. No more writes follow the outstanding ones."""
        task = self.tasks.find(key)
        if task is not None:
            self._stop_computing(task)

    def on_closed(self, key: HandoffKey, error: str) -> str:
        """Note that the sink is being told that the handoff ended. Returns the request's fault, if
        any."""
        task = self.tasks.find(key)
        if task is None:
            return ""
        task.answered = True
        task.error = task.error or error
        return task.code

    def on_released(self, key: HandoffKey) -> None:
        """The handoff is over: end the task and tell its router the outcome."""
        task = self.tasks.find(key)
        if task is None:
            return
        self.tasks.remove(task)
        self._stop_computing(task)
        self._scheduler.release_blocks(task.sequence)
        if task.unwanted:
            return
        if task.token is None or not task.answered or task.error:
            reason = task.error or self._source.error_of(key) or "the sink gave up"
            in_time = self._clock.now() < task.sequence.deadline
            retryable = in_time and not task.is_hopeless
            code, trace_id = task.code, task.sequence.trace_id
            failure = self._host.failure(
                key, reason, retryable, task.lacks_room, code=code, trace_id=trace_id
            )
            computed = task.computed_tokens
            failure = msgspec.structs.replace(failure, computed_tokens=computed)
            self._host.send(task.router, failure)
        else:
            self._host.flight.note(FlightKind.FINISHED, key)
            trace = self._trace(task)
            done = PrefillDone(request_id=key.request_id, attempt=key.attempt, trace=trace)
            self._host.send(task.router, done)

    def holders(self) -> list[str]:
        """The holders of blocks, for people."""
        held = [
            f"{len(task.sequence.block_table)} blocks: {task.key}, {task.sequence.state}, "
            f"for {task.sequence.target or 'an unnamed decode worker'}, "
            f"{self._source.state_of(task.key)}"
            for task in self.tasks
            if task.sequence.block_table
        ]
        return held + self._inbound.fenced.describe()

    def _stop_computing(self, task: PrefillTask) -> None:
        self._fetches.drop(task.sequence)
        if task.sequence.state is not SequenceState.FINISHED:
            self._scheduler.finish(task.sequence, release=False)

    def _trace(self, task: PrefillTask) -> PrefillTrace:
        return task.trace(
            self._host.worker_id,
            self._host.transfers.transport_name,
        )
